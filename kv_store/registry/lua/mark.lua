#!lua flags=allow-oom
-- What this shard remembers of a worker's writes. KEYS: memory.
-- ARGV: worker id, incarnation, number of this batch ('0' only looks), an epoch in case there is none, time to live in ms.
-- Field '' is the epoch, a random id that is lost with the data. Other fields: expiry | number of the last batch | incarnation.
-- Returns {epoch, number of the batch before; 0 when this life is not known}.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local epoch = redis.call('HGET', KEYS[1], '')
if not epoch then
  epoch = ARGV[4]
  redis.call('HSET', KEYS[1], '', epoch)
end
local before = '0'
local stored = redis.call('HGET', KEYS[1], ARGV[1])
if stored then
  local _, number, incarnation = string.match(stored, '^(%d+)|(%d+)|(.*)$')
  if incarnation == ARGV[2] then before = number end
else
  -- Newcomers sweep the dead.
  local rows = redis.call('HGETALL', KEYS[1])
  for i = 1, #rows, 2 do
    local expiry = rows[i] ~= '' and tonumber(string.match(rows[i + 1], '^%d+'))
    if expiry and expiry <= now then redis.call('HDEL', KEYS[1], rows[i]) end
  end
end
local number = ARGV[3] == '0' and before or ARGV[3]
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d|%s|%s', now + ARGV[5], number, ARGV[2]))
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[5]) then redis.call('PEXPIRE', KEYS[1], ARGV[5]) end
return {epoch, tonumber(before)}
