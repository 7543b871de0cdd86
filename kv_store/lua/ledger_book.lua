#!lua flags=allow-oom
-- How a pool's reservations are kept; every step of the ledger begins with this.
-- KEYS: workers, nonces, ends. ARGV: ms for which an unused worker is kept, most ends to look at, then the step's own.
-- workers  hash: worker id -> packed t = last use, v = its lives, the one that came up last is last, each
--          i = incarnation, u = who numbers its reservations (a random id, lost with the numbers), s = last sequence,
--          r = open reservations, one behind the other, each nonce, sequence, prefill tokens, kv tokens, end.
--          Field '' = how many are open in the pool.
-- nonces   hash: nonce -> packed {worker id ('' where the release came first), incarnation, who numbers, sequence,
--          prefill tokens, kv tokens, end, 1 if open}
-- ends     sorted set: 'n' and nonce, or 'w' and worker id, by when they may go
-- Times are ms of this server's clock.
local workers, nonces, ends = KEYS[1], KEYS[2], KEYS[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local keep = tonumber(ARGV[1])
local opened, expired, dropped = 0, 0, 0
local known, changed = {}, {}
local WIDTH = 5

local function load(ids)
  for i, stored in ipairs(redis.call('HMGET', workers, unpack(ids))) do
    if known[ids[i]] == nil then known[ids[i]] = stored and cmsgpack.unpack(stored) or false end
  end
end

local function worker_of(id)
  if known[id] == nil then load({id}) end
  return known[id]
end

local function life_of(id, incarnation)
  local worker = worker_of(id)
  for _, life in ipairs(worker and worker.v or {}) do
    if life.i == incarnation then return life end
  end
end

-- Remember a nonce until its end; the backstop is the same for all keys: one without the others would count wrongly.
local function remember(nonce, record)
  redis.call('HSET', nonces, nonce, cmsgpack.pack(record))
  redis.call('ZADD', ends, record[7], 'n' .. nonce)
  for _, key in ipairs(KEYS) do redis.call('PEXPIREAT', key, now + 2 * keep) end
end

local function record_of(nonce)
  local stored = redis.call('HGET', nonces, nonce)
  return stored and cmsgpack.unpack(stored)
end

-- Say of a nonce that its reservation is over; it stays known until its end.
local function settle(nonce, record)
  opened = opened - 1
  if record then
    record[8] = 0
    redis.call('HSET', nonces, nonce, cmsgpack.pack(record))
  end
end

local function close(nonce, record)
  settle(nonce, record)
  local life = life_of(record[1], record[2])
  local rows = life and life.r or {}
  for i = 1, #rows, WIDTH do
    if rows[i] == nonce then
      for _ = 1, WIDTH do table.remove(rows, i) end
      changed[record[1]] = true
      return
    end
  end
end

local function close_all(id, life)
  local rows = life.r
  for i = 1, #rows, WIDTH do settle(rows[i], record_of(rows[i])) end
  local num_rows = #rows / WIDTH
  dropped = dropped + num_rows
  life.r = {}
  changed[id] = true
  return num_rows
end

-- Forget a nonce whose end has come.
local function lapse(nonce, record)
  if record and record[8] == 1 then
    close(nonce, record)
    expired = expired + 1
  end
  redis.call('HDEL', nonces, nonce)
  redis.call('ZREM', ends, 'n' .. nonce)
end

local function sweep()
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, ARGV[2])) do
    local id = string.sub(name, 2)
    if string.sub(name, 1, 1) == 'n' then
      lapse(id, record_of(id))
    else
      -- Its reservations have gone before it: none lives longer than it is kept.
      local worker = worker_of(id)
      if worker and worker.t + keep > now then
        redis.call('ZADD', ends, worker.t + keep, name)
      else
        known[id], changed[id] = nil, nil
        redis.call('HDEL', workers, id)
        redis.call('ZREM', ends, name)
      end
    end
  end
end

-- Write what has changed. Returns what every step says last: open in the pool, expired now, dropped now.
local function save()
  for id in pairs(changed) do redis.call('HSET', workers, id, cmsgpack.pack(known[id])) end
  local num_open = opened ~= 0 and redis.call('HINCRBY', workers, '', opened) or redis.call('HGET', workers, '')
  return tonumber(num_open or 0), expired, dropped
end
