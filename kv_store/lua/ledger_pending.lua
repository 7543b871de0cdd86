-- The live reservations. No ARGV.
-- Returns {{nonce, worker id, incarnation, who numbers, sequence, prefill tokens, kv tokens} ..., ...}.
sweep()
local reply = {}
local rows = redis.call('HGETALL', workers)
for i = 1, #rows, 2 do
  local worker = rows[i] ~= '' and worker_of(rows[i])
  for _, life in ipairs(worker and worker.v or {}) do
    local r = life.r
    for k = 1, #r, WIDTH do
      if r[k + 4] > now then reply[#reply + 1] = {r[k], rows[i], life.i, life.u, r[k + 1], r[k + 2], r[k + 3]} end
    end
  end
end
return {reply, save()}
