// The right-hand side: what the engine and its cache are doing, twice a second.

import { byId, bytes, count, events, make, request } from "./client.js";

const KEPT = 120; // samples in a chart: one minute
const SPAN_MS = 2000; // rates are means over this time

const history = []; // {time, generated, computed} as counters
const rates = { generated: [], computed: [] };

function setText(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

function rate(name) {
  const last = history.at(-1);
  const first = history.find((s) => last.time - s.time <= SPAN_MS) ?? last;
  const seconds = (last.time - first.time) / 1000;
  return seconds > 0 ? Math.max(0, (last[name] - first[name]) / seconds) : 0;
}

const SVG = "http://www.w3.org/2000/svg";

function drawChart(id, values, label) {
  const svg = byId(id);
  const width = 240;
  const height = 44;
  if (!svg.firstChild) {
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("preserveAspectRatio", "none");
    for (const name of ["area", "line"]) {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      svg.append(path);
    }
  }
  const top = Math.max(1, ...values);
  const x = (i) => width - (values.length - 1 - i) * (width / (KEPT - 1));
  const points = values.map((v, i) => `${x(i).toFixed(1)},${(height - 2 - (v / top) * (height - 6)).toFixed(1)}`);
  const line = `M${points.join("L")}`;
  svg.children[0].setAttribute("d", `${line}L${width},${height}L${x(0).toFixed(1)},${height}Z`);
  svg.children[1].setAttribute("d", line);
  svg.setAttribute("aria-label", `${label} over the last minute: now ${count(values.at(-1))}, at most ${count(Math.max(...values))}`);
}

function drawRates(state) {
  const { generation_tokens_total: generated, computed_tokens_total: computed } = state.stats;
  if (history.length && (state.time_ms < history.at(-1).time || generated < history.at(-1).generated)) {
    history.length = 0; // another server
  }
  history.push({ time: state.time_ms, generated, computed });
  while (history.length > 2 && state.time_ms - history[0].time > 2 * SPAN_MS) history.shift();
  for (const name of ["generated", "computed"]) {
    const value = rate(name);
    rates[name].push(value);
    if (rates[name].length > KEPT) rates[name].shift();
    setText(`rate-${name}`, `${value < 10 && value > 0 ? value.toFixed(1) : count(value)} tok/s`);
    drawChart(`chart-${name}`, rates[name], `Tokens per second ${name}`);
  }
}

function drawPool(id, name, about, pool) {
  const root = byId(id);
  if (!root.firstChild) {
    root.append(
      make("div", "head", make("span"), make("span", "muted")),
      make("div", "bar", make("i", "used"), make("i", "cached")),
      make("div", "detail"),
    );
    root.children[1].setAttribute("role", "img");
  }
  const [head, bar, detail] = root.children;
  head.children[0].textContent = name;
  if (!pool.num_blocks) {
    head.children[1].textContent = "this model has none";
    bar.hidden = detail.hidden = true;
    return;
  }
  const size = (blocks) => bytes(blocks * pool.block_bytes);
  head.children[1].textContent = `${size(pool.num_blocks)}${about ? `, ${about}` : ""}`;
  const width = (blocks) => (blocks ? `max(3px, ${(100 * blocks) / pool.num_blocks}%)` : "0"); // never invisible
  bar.children[0].style.width = width(pool.used);
  bar.children[1].style.width = width(pool.cached);
  const parts = [["in use", pool.used], ["cached", pool.cached], ["free", pool.free]];
  const text = parts.map(([word, blocks]) => `${count(blocks)} ${word} (${size(blocks)})`).join(" · ");
  detail.textContent = text;
  bar.setAttribute("aria-label", `${name}: ${text}, of ${count(pool.num_blocks)} blocks`);
}

function drawHits(stats) {
  const root = byId("hits");
  const rows = [
    ["full", stats.full_hit_tokens_total, "Longest prefix with live full-attention KV"],
    ["window-safe", stats.window_safe_hit_tokens_total, "Longest prefix one may resume from without replay"],
    ["effective", stats.effective_hit_tokens_total, "Prompt tokens not computed because of the cache"],
  ];
  if (!root.firstChild) {
    for (const [name, , title] of rows) {
      const row = make("div", name === "effective" ? "hit main" : "hit");
      row.title = title;
      row.append(make("span", "", `${name} hit`), make("div", "bar", make("i")), make("b"));
      root.append(row);
    }
  }
  const asked = stats.prefix_query_tokens_total;
  drawTierHits(stats, asked);
  rows.forEach(([, tokens], i) => {
    const row = root.children[i];
    const share = asked ? (100 * tokens) / asked : 0;
    row.children[1].firstChild.style.width = `${share}%`;
    row.children[2].textContent = asked ? `${share.toFixed(share < 10 ? 1 : 0)} %` : "–";
  });
}

/** Which tier the effective hit came from, below its bar. */
function drawTierHits(stats, asked) {
  const lower = stats.host_hit_tokens_total + stats.store_hit_tokens_total;
  const parts = [
    ["device", stats.effective_hit_tokens_total - lower],
    ["host", stats.host_hit_tokens_total],
    ["store", stats.store_hit_tokens_total],
  ];
  setText("hit-tiers", asked ? parts.map(([tier, tokens]) => `${tier} ${count(tokens)}`).join(" · ") : "–");
}

function drawTiers(stats, tiers, about) {
  const hasHost = tiers.includes("host");
  byId("device-title").hidden = byId("tier-host").hidden = byId("hit-tiers-line").hidden = !hasHost;
  byId("tier-store").hidden = !tiers.includes("store");
  if (!hasHost) return;
  drawPool("pool-host-full", "Full attention", about.full, stats.host_full);
  drawPool("pool-host-swa", "Sliding window", about.swa, stats.host_swa);
  setText("loaded", count(stats.loaded_full_blocks_total + stats.loaded_swa_blocks_total));
  setText("saved", count(stats.saved_full_blocks_total + stats.saved_swa_blocks_total));
  setText("host-windows", count(stats.host_tree_windows));
  setText("store-read", bytes(stats.store_read_bytes_total));
  setText("store-written", bytes(stats.store_written_bytes_total));
  setText("store-waiting", count(stats.store_waiting_fetches + stats.store_waiting_puts));
  setText("store-lost", count(stats.store_lost_objects_total + stats.store_failed_objects_total));
  setText("store-timeouts", count(stats.store_timeouts_total));
}

function draw(state) {
  const { stats, model, cache } = state;
  const layers = (group) => (group ? `${group.num_layers} layers` : "");
  setText("running", count(stats.num_running));
  setText("waiting", count(stats.num_waiting));
  setText("preemptions", count(stats.preemptions_total));
  setText("step", stats.steps_total ? `${stats.last_step_ms.toFixed(stats.last_step_ms < 10 ? 1 : 0)} ms` : "–");
  setText("tree-blocks", count(stats.tree_blocks));
  setText("tree-windows", count(stats.tree_windows));
  setText("rebuilt", count(stats.rebuilt_tokens_total));
  setText("truncated", count(stats.truncated_tokens_total));
  setText("evicted-blocks", count(stats.evicted_full_blocks_total));
  setText("evicted-windows", count(stats.evicted_windows_total));
  const window = cache.window ? `window ${count(cache.window)}` : "";
  const about = {
    full: layers(model.geometry?.full),
    swa: [layers(model.geometry?.swa), window].filter(Boolean).join(", "),
  };
  drawPool("pool-full", "Full attention", about.full, stats.full);
  drawPool("pool-swa", "Sliding window", about.swa, stats.swa);
  drawTiers(stats, cache.tiers, about);
  drawHits(stats);
  drawRates(state);
  setText("summary", `${state.summary}\nCygnet ${state.version}`);
}

function setHealth(text, kind) {
  const pill = byId("health");
  pill.textContent = text;
  pill.className = `pill ${kind}`;
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Follow the server for ever. `onState` gets each snapshot; `onKeyNeeded` resolves once there is a key to try. */
export async function follow(onState, onKeyNeeded) {
  for (let wait = 500; ; wait = Math.min(5000, wait * 2)) {
    try {
      for await (const state of events(await request("/api/state/stream"))) {
        wait = 500;
        setHealth(state.healthy ? "ready" : "engine stopped", state.healthy ? "good" : "bad");
        draw(state);
        onState(state);
      }
    } catch (error) {
      if (error.status === 401) {
        setHealth("key needed", "bad");
        await onKeyNeeded();
        wait = 250;
        continue;
      }
    }
    setHealth("unreachable", "bad");
    await pause(wait);
  }
}

export function wireFlush() {
  byId("flush").addEventListener("click", async () => {
    try {
      const { dropped } = await (await request("/reset_prefix_cache", { method: "POST" })).json();
      setText("flush-status", `dropped ${count(dropped.device_blocks + dropped.host_blocks)} blocks`);
    } catch (error) {
      setText("flush-status", error.message);
    }
    setTimeout(() => setText("flush-status", ""), 3000);
  });
}
