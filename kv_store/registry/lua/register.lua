#!lua flags=allow-oom
-- Start or renew one life of a worker. KEYS: worker table. ARGV: worker id, incarnation, lease in ms, record.
-- Field '' of the table is its version: it changes when a reader's copy would be wrong, not on a mere renewal.
-- Other fields: JSON of e = expiry ms, s = since ms, i = incarnation, f = replaced incarnations, r = record.
-- A record of a lower generation than this life has renews the lease and changes nothing else.
-- Returns 0 when a live life has replaced this one, 1 when the lease was renewed, 2 when this life was not there.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function read(value)
  local life = cjson.decode(value)
  return life.e > now and life or nil
end
local function generation(record) return cjson.decode(record).generation or 0 end

local stored = redis.call('HGET', KEYS[1], ARGV[1])
local old = stored and read(stored)
local life = {e = now + ARGV[3], s = now, i = ARGV[2], f = {}, r = ARGV[4]}
if old then
  life.f = old.f
  for _, replaced in ipairs(old.f) do
    if replaced == ARGV[2] then return 0 end
  end
  if old.i == ARGV[2] then
    life.s = old.s
    -- It was overtaken by the registration of a later generation.
    if old.r ~= life.r and generation(old.r) > generation(life.r) then life.r = old.r end
  else
    table.insert(life.f, old.i)
    if #life.f > 8 then table.remove(life.f, 1) end
  end
end
redis.call('HSET', KEYS[1], ARGV[1], cjson.encode(life))

if not old or old.i ~= ARGV[2] or old.r ~= life.r then
  -- Newcomers sweep the dead; renewals, which are many, do not.
  local rows = redis.call('HGETALL', KEYS[1])
  for i = 1, #rows, 2 do
    if rows[i] ~= '' and not read(rows[i + 1]) then redis.call('HDEL', KEYS[1], rows[i]) end
  end
  local version = time[1] .. '.' .. time[2]
  if version == redis.call('HGET', KEYS[1], '') then version = version .. '+' end
  redis.call('HSET', KEYS[1], '', version)
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return old and old.i == ARGV[2] and 1 or 2
