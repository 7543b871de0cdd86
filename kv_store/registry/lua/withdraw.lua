#!lua flags=allow-oom
-- End one worker's claim on one block, unless another life of it made the claim.
-- KEYS: block. ARGV: worker id, incarnation.
local value = redis.call('HGET', KEYS[1], ARGV[1])
if value and string.match(value, '^%d+|[^|]*|[^|]*|(.*)$') == ARGV[2] then
  return redis.call('HDEL', KEYS[1], ARGV[1])
end
return 0
