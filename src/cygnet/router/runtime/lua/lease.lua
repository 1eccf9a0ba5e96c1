-- Settle, release and renew leases. ARGV: prefix, msgpack of {ids to release, [id, cost] to settle, [id, slot, cost] to
-- renew, lease in ms}. What has ended before is left alone, what was lost is entered again. With a lease time, leases
-- that have run out are taken back too: those of routers that died, also when no request comes.
local pre = ARGV[1]
local work = cmsgpack.unpack(ARGV[2])
local call = redis.call
local loads_key, held_key, lease_key = pre .. 'load', pre .. 'held', pre .. 'lease'
local function add(slot, cost)
  if call('HINCRBY', loads_key, slot, cost) == 0 then call('HDEL', loads_key, slot) end
end
for _, item in ipairs(work[2]) do
  local held = call('HGET', held_key, item[1])
  if held then
    local slot, cost = string.match(held, '^(%d+)|(%d+)$')
    call('HSET', held_key, item[1], string.format('%s|%d', slot, item[2]))
    add(slot, item[2] - cost)
  end
end
for _, id in ipairs(work[1]) do
  local held = call('HGET', held_key, id)
  if held then
    local slot, cost = string.match(held, '^(%d+)|(%d+)$')
    call('HDEL', held_key, id)
    call('ZREM', lease_key, id)
    add(slot, -cost)
  end
end
if work[4] > 0 then
  local time = call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local expiry = now + work[4]
  for _, item in ipairs(work[3]) do
    if call('GETBIT', pre .. 'live', item[2]) == 1 then
      local held = call('HGET', held_key, item[1])
      if not held then
        call('HSET', held_key, item[1], string.format('%d|%d', item[2], item[3]))
        add(item[2], item[3])
      end
      call('ZADD', lease_key, expiry, item[1])
    end
  end
  for _, id in ipairs(call('ZRANGEBYSCORE', lease_key, '-inf', now, 'LIMIT', 0, 1024)) do
    local held = call('HGET', held_key, id)
    if held then
      local slot, cost = string.match(held, '^(%d+)|(%d+)$')
      call('HDEL', held_key, id)
      add(slot, -cost)
    end
    call('ZREM', lease_key, id)
  end
end
return 1
