#!lua flags=no-writes
-- The live workers. KEYS: worker table. ARGV: the version that the reader has, '' for none.
-- Returns {version} when the reader is up to date, else {version, 'full', then remaining ms, age ms, record of each worker}.
local version = redis.call('HGET', KEYS[1], '') or ''
if version ~= '' and version == ARGV[1] then return {version} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local reply = {version, 'full'}
local rows = redis.call('HGETALL', KEYS[1])
for i = 1, #rows, 2 do
  if rows[i] ~= '' then
    local life = cjson.decode(rows[i + 1])
    if life.e > now then
      reply[#reply + 1] = life.e - now
      reply[#reply + 1] = now - life.s
      reply[#reply + 1] = life.r
    end
  end
end
return reply
