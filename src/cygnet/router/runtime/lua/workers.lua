-- Registry of workers; mirrors cygnet/router/slots.py. ARGV: prefix, verb, url, and by verb:
--   join:    record (JSON with expires_at 0), ttl in ms or 0, quarantine in ms, most slots  -> slot or -1
--   leave:   -                                                                              -> slot it had or -1
--   restart: slot, quarantine in ms, most slots                                             -> slot or -1
--   roster:  -                                        -> {epoch, version, slot, record, expires_at, slot, ...}
local pre, verb, url = ARGV[1], ARGV[2], ARGV[3]
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local meta, workers, slots, ends, freed, live =
  pre .. 'meta', pre .. 'workers', pre .. 'slots', pre .. 'ends', pre .. 'freed', pre .. 'live'

local function changed() call('HINCRBY', meta, 'version', 1) end

local function leave(name)
  local slot = call('HGET', slots, name)
  if not slot then return -1 end
  call('HDEL', slots, name)
  call('HDEL', workers, name)
  call('HDEL', ends, name)
  call('SETBIT', live, slot, 0)
  call('ZADD', freed, now, slot)
  -- Leases on a worker that is gone are void.
  call('HDEL', pre .. 'load', slot)
  local held = call('HGETALL', pre .. 'held')
  for i = 1, #held, 2 do
    if string.match(held[i + 1], '^(%d+)|') == slot then
      call('HDEL', pre .. 'held', held[i])
      call('ZREM', pre .. 'lease', held[i])
    end
  end
  changed()
  return tonumber(slot)
end

local function join(record, ttl, quarantine, most)
  local expiry = ttl > 0 and now + ttl or 0
  local slot = call('HGET', slots, url)
  if not slot then
    local free = call('ZRANGEBYSCORE', freed, '-inf', now - quarantine, 'LIMIT', 0, 1)
    if free[1] then
      slot = free[1]
      call('ZREM', freed, slot)
    else
      slot = tonumber(call('HGET', meta, 'next') or 0)
      if slot >= most then return -1 end
      call('HINCRBY', meta, 'next', 1)
    end
    call('HSET', slots, url, slot)
    call('SETBIT', live, slot, 1)
    changed()
  elseif call('HGET', workers, url) ~= record then
    changed()
  end
  call('HSET', workers, url, record)
  call('HSET', ends, url, string.format('%d', expiry))
  return tonumber(slot)
end

if verb == 'join' then
  return join(ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]))
elseif verb == 'leave' then
  return leave(url)
elseif verb == 'restart' then
  local slot = call('HGET', slots, url)
  if not slot then return -1 end
  if slot ~= ARGV[4] then return tonumber(slot) end
  local record, expiry = call('HGET', workers, url), call('HGET', ends, url)
  leave(url)
  local new = join(record, 0, tonumber(ARGV[5]), tonumber(ARGV[6]))
  if new >= 0 then call('HSET', ends, url, expiry) end
  return new
end
local all = call('HGETALL', ends)
for i = 1, #all, 2 do
  local expiry = tonumber(all[i + 1])
  if expiry > 0 and expiry <= now then leave(all[i]) end
end
call('HSETNX', meta, 'epoch', string.format('%d', now))
local reply = {tonumber(call('HGET', meta, 'epoch')), tonumber(call('HGET', meta, 'version') or 0)}
local records = call('HGETALL', workers)
for i = 1, #records, 2 do
  reply[#reply + 1] = tonumber(call('HGET', slots, records[i]))
  reply[#reply + 1] = records[i + 1]
  reply[#reply + 1] = call('HGET', ends, records[i])
end
return reply
