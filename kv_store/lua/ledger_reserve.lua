-- Choose the cheapest candidate and reserve on it.
-- ARGV: nonce, ms to live, prefill tokens, kv tokens, who numbers the reservations of a life that is new, candidates.
-- Candidates: JSON of one or more {worker id, incarnation, cost, cost per token, per request, per token without room,
-- room, {who numbers: {sequence up to which the heartbeat counts, more sequences ...}}}.
-- Returns {worker id ('' where the release came first), incarnation, who numbers, sequence, prefill tokens, kv tokens,
-- ...}.
local nonce, ttl, prefill, kv, issuer = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]

local function counts(seen, sequence)
  if not seen then return false end
  if sequence <= seen[1] then return true end
  for i = 2, #seen do
    if seen[i] == sequence then return true end
  end
  return false
end

-- Let a life that comes up for the first time end the reservations of those before it.
local function meet(candidate)
  local worker = worker_of(candidate[1])
  if not worker or life_of(candidate[1], candidate[2]) then return end
  for _, life in ipairs(worker.v) do close_all(candidate[1], life) end
  table.insert(worker.v, {i = candidate[2], u = issuer, s = 0, r = {}})
  if #worker.v > 8 then table.remove(worker.v, 1) end
  changed[candidate[1]] = true
end

local function total(candidate)
  local life = life_of(candidate[1], candidate[2])
  local pending_prefill, pending_kv, num_pending = 0, 0, 0
  if life then
    local seen, rows = candidate[8][life.u], life.r
    for i = 1, #rows, WIDTH do
      if rows[i + 4] > now and not counts(seen, rows[i + 1]) then
        pending_prefill, pending_kv = pending_prefill + rows[i + 2], pending_kv + rows[i + 3]
        num_pending = num_pending + 1
      end
    end
  end
  local lacking = math.max(0, pending_kv + kv - candidate[7])
  return candidate[3] + candidate[4] * pending_prefill + candidate[5] * num_pending + candidate[6] * lacking
end

sweep()
local record = record_of(nonce)
if record and record[7] <= now then
  lapse(nonce, record)
  record = nil
end
if record then return {record[1], record[2], record[3], record[4], record[5], record[6], save()} end

local candidates, ids = cjson.decode(ARGV[8]), {}
for i, candidate in ipairs(candidates) do ids[i] = candidate[1] end
load(ids)
for _, candidate in ipairs(candidates) do meet(candidate) end
local chosen, least
for _, candidate in ipairs(candidates) do
  local cost = total(candidate)
  if not chosen or cost < least then chosen, least = candidate, cost end
end

local id, incarnation = chosen[1], chosen[2]
local worker = worker_of(id)
if not worker then
  worker = {v = {{i = incarnation, u = issuer, s = 0, r = {}}}}
  known[id] = worker
  redis.call('ZADD', ends, now + keep, 'w' .. id)
end
local life = life_of(id, incarnation)
life.s, worker.t = life.s + 1, now
for _, word in ipairs({nonce, life.s, prefill, kv, now + ttl}) do table.insert(life.r, word) end
changed[id] = true
opened = opened + 1
local reply = {id, incarnation, life.u, life.s, prefill, kv, save()}
remember(nonce, {id, incarnation, life.u, life.s, prefill, kv, now + ttl, 1})
return reply
