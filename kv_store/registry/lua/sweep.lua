#!lua flags=allow-oom
-- Drop one claim if nobody has renewed it since it was read. KEYS: block. ARGV: worker id, field value as read.
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then return redis.call('HDEL', KEYS[1], ARGV[1]) end
return 0
