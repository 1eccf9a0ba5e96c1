-- Place one request: longest match, choice, lease, load, insert. Mirrors cygnet/router/local_state.py step by step:
-- match_depths (index.py), choose (scoring.py), PrefixIndex.insert. A test compares the two.
-- ARGV: prefix of all keys, request id, chain, msgpack of the plan, msgpack of the numbers.
-- Returns {candidate (from 1), matched tokens, cost, spilled}, or {0, best match in tokens, 0, 0}.
local pre, id, chain = ARGV[1], ARGV[2], ARGV[3]
local plan, num = cmsgpack.unpack(ARGV[4]), cmsgpack.unpack(ARGV[5])
local slots, bonus, low, high = plan[1], plan[2], plan[3], plan[4]
local match_weight, load_weight, floor_, budget = plan[5], plan[6], plan[7], plan[8]
local request_tokens, by_total, spill = plan[9], plan[10], plan[11]
local tokens, block_tokens, chance, ttl, lease, max_blocks, tail = num[1], num[2], num[3], num[4], num[5], num[6], num[7]
local known, known_blocks, waited, is_late, look = num[8], num[9], num[10], num[11], num[12]
local call, sub, byte, floor, min, max = redis.call, string.sub, string.byte, math.floor, math.min, math.max
local band, rshift = bit.band, bit.rshift
local time = call('TIME')
local now = time[1] * 1000 + floor(time[2] / 1000)
local loads_key, held_key, lease_key = pre .. 'load', pre .. 'held', pre .. 'lease'

-- Leases of routers that died.
local late = call('ZRANGEBYSCORE', lease_key, '-inf', now, 'LIMIT', 0, 16)
for i = 1, #late do
  local held = call('HGET', held_key, late[i])
  if held then
    local slot, cost = string.match(held, '^(%d+)|(%d+)$')
    if call('HINCRBY', loads_key, slot, -cost) == 0 then call('HDEL', loads_key, slot) end
    call('HDEL', held_key, late[i])
  end
  call('ZREM', lease_key, late[i])
end

-- Longest match per candidate.
local n = min(floor(#chain / 8), max_blocks)
local function key(depth) return pre .. 'b:' .. sub(chain, depth * 8 - 7, depth * 8) end
local function step(depth) if depth < 32 then return 1 elseif depth < 256 then return 4 else return 16 end end
local rungs, num_rungs, d = {}, 0, 1
while d <= n do num_rungs = num_rungs + 1; rungs[num_rungs] = d; d = d + step(d) end
local count, place_of, match = #slots, {}, {}
for k = 1, count do place_of[slots[k]] = k; match[k] = 0 end
-- Notes a bitmap and returns it with only the candidates' bits, as text that can be compared.
local seen = {}
local function note(bitmap, depth)
  if not bitmap then return '' end
  local known = seen[bitmap]
  if not known then
    local held, marks = {}, {}
    for k = 1, count do
      local slot = slots[k]
      local part = byte(bitmap, floor(slot / 8) + 1)
      if part and band(part, rshift(128, slot % 8)) ~= 0 then held[#held + 1] = k; marks[#marks + 1] = k end
    end
    known = {held, table.concat(marks, ',')}
    seen[bitmap] = known
  end
  for i = 1, #known[1] do local k = known[1][i]; if match[k] < depth then match[k] = depth end end
  return known[2]
end
local function probe(rung) return note(call('GET', key(rungs[rung])), rungs[rung]) end
local function refine(at, at_bits, to, to_bits)
  if to - at <= 1 or at_bits == to_bits then return end
  local middle = floor((at + to) / 2)
  local bits = probe(middle)
  refine(at, at_bits, middle, bits)
  refine(middle, bits, to, to_bits)
end
if n > 0 then
  local first = probe(1)
  if first ~= '' then
    refine(1, first, num_rungs, probe(num_rungs))
    local deepest = 0
    for k = 1, count do deepest = max(deepest, match[k]) end
    for depth = min(n, deepest + step(deepest) - 1), deepest + 1, -1 do
      if note(call('GET', key(depth)), depth) ~= '' then break end
    end
  end
end

-- In tokens; what a worker told of itself goes before what was routed to it, as far as it speaks of it.
local spared, best_match = {}, 0
for k = 1, count do
  local told = known[k] or -1
  if told < 0 or match[k] > known_blocks then told = min(match[k] * block_tokens, tokens) end
  spared[k], best_match = told, max(best_match, told)
end
if look then return {0, best_match, 0, 0} end

-- Choice.
local loads, total_load = call('HMGET', loads_key, unpack(slots)), 0
for k = 1, count do loads[k] = tonumber(loads[k] or 0) or 0; total_load = total_load + loads[k] end
local total = max(tokens, 1)
local norm = max(total_load / count, total, floor_)
local best, best_tier, best_score = {}, 2, 0
local idle = floor(budget / 8)
local enough, holder, aged_holder = is_late and budget or idle, -math.huge, -math.huge
for k = 1, count do
  local matched = spared[k]
  local uncached, load = tokens - matched, loads[k]
  local fraction = matched / total
  local size = by_total and tokens or uncached
  local fits = size < high[k] and (size >= low[k] or (not by_total and fraction >= 0.5))
  if fits or spill then
    local score = bonus[k] + match_weight * fraction - load_weight * (load / norm)
    if budget > 0 and load > enough and load + uncached > budget then
      if fits and load_weight ~= 0 and score > holder then
        holder, aged_holder = score, score - load_weight * (waited / norm)
      end
    else
      local tier = fits and 0 or 1
      if tier < best_tier or (tier == best_tier and score > best_score) then
        best, best_tier, best_score = {k}, tier, score
      elseif tier == best_tier and score == best_score then
        best[#best + 1] = k
      end
    end
  end
end
if #best == 0 then return {0, best_match, 0, 0} end
local place = best[floor(chance * #best) + 1]
if holder > best_score and (aged_holder > best_score or loads[place] > idle) then return {0, best_match, 0, 0} end
local slot, matched = slots[place], match[place]
local cost = tokens - spared[place] + request_tokens

-- Lease and load. A slot that has just been given up gets neither.
if call('GETBIT', pre .. 'live', slot) == 0 then return {place, spared[place], cost, best_tier} end
local before = call('HGET', held_key, id)
if before then
  local old_slot, old_cost = string.match(before, '^(%d+)|(%d+)$')
  if call('HINCRBY', loads_key, old_slot, -old_cost) == 0 then call('HDEL', loads_key, old_slot) end
end
call('HSET', held_key, id, string.format('%d|%d', slot, cost))
call('ZADD', lease_key, now + lease, id)
call('HINCRBY', loads_key, slot, cost)

-- Insert.
if n > 0 then
  local left = matched > 0 and call('PTTL', key(matched)) or -1
  local renew = left < ttl * 7 / 8
  if renew then left = ttl end
  local from = renew and 1 or matched + 1
  local live = pre .. 'live'
  local function put(depth)
    if depth < from then return end
    local k = key(depth)
    if renew then call('BITOP', 'AND', k, k, live) end
    call('SETBIT', k, slot, 1)
    call('PEXPIRE', k, left)
  end
  for i = 1, num_rungs do put(rungs[i]) end
  for depth = max(1, n - tail + 1), n do if depth > 32 then put(depth) end end
end
return {place, spared[place], cost, best_tier}
