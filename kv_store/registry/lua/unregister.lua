#!lua flags=allow-oom
-- End one life of a worker, unless another life has replaced it. KEYS: worker table. ARGV: worker id, incarnation.
local stored = redis.call('HGET', KEYS[1], ARGV[1])
if not stored or cjson.decode(stored).i ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
local time = redis.call('TIME')
local version = time[1] .. '.' .. time[2]
if version == redis.call('HGET', KEYS[1], '') then version = version .. '+' end
redis.call('HSET', KEYS[1], '', version)
return 1
