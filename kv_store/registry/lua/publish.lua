-- One worker's claim on one block. KEYS: block. ARGV: worker id, incarnation, tier, time to live in ms, generation.
-- Field value: expiry in ms of this server's clock | tier | generation | incarnation.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d|%s|%s|%s', now + ARGV[4], ARGV[3], ARGV[5], ARGV[2]))
-- A popular block outlives its dead holders, so whoever publishes it also sweeps it.
if redis.call('HLEN', KEYS[1]) > 1 then
  local row = redis.call('HGETALL', KEYS[1])
  for i = 1, #row, 2 do
    local expiry = tonumber(string.match(row[i + 1], '^%d+'))
    if not expiry or expiry <= now then redis.call('HDEL', KEYS[1], row[i]) end
  end
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[4]) then redis.call('PEXPIRE', KEYS[1], ARGV[4]) end
return 1
