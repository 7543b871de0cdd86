#!lua flags=allow-oom
-- Take or keep the lead of the clean-up here. KEYS: leader. ARGV: who, lease in ms.
-- Returns 2 when the lead is new, 1 when it was kept, 0 when somebody else has it.
local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return leader and 1 or 2
