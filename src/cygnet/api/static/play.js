// The left-hand side: completions and chat, streamed.

import { byId, count, events, make, request } from "./client.js";

const KEPT = 20; // answers on the page

function options() {
  const fields = { stream: true, stream_options: { include_usage: true } };
  const read = (id, name, parse) => {
    const text = byId(id).value;
    if (text !== "") fields[name] = parse(text);
  };
  read("opt-max", "max_tokens", Number);
  read("opt-temperature", "temperature", Number);
  read("opt-top-p", "top_p", Number);
  read("opt-seed", "seed", Number);
  read("opt-stop", "stop", (text) => text.replaceAll("\\n", "\n"));
  return fields;
}

/** One streamed answer: writes into `target`, reports into `stats`, resolves to the text. */
async function stream(path, body, { target, stats, signal, text }) {
  const started = performance.now();
  let first = 0;
  let last = 0;
  let usage = null;
  let reason = "";
  let all = "";
  for await (const event of events(await request(path, { body, signal }))) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) usage = event.usage;
    for (const choice of event.choices) {
      const piece = text(choice);
      if (choice.finish_reason) reason = choice.finish_reason;
      if (!piece) continue;
      last = performance.now();
      if (!first) {
        first = last;
        stats.replaceChildren(item(duration(first - started), "to first token"), "streaming…");
      }
      all += piece;
      target.append(piece);
    }
  }
  if (usage) showStats(stats, { usage, reason, ttft: (first || performance.now()) - started, span: last - first });
  return all;
}

const item = (value, unit) => make("span", "", make("b", "", value), ` ${unit}`);
const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

function showStats(root, { usage, reason, ttft, span }) {
  const tokens = usage.completion_tokens;
  const cached = usage.prompt_tokens_details.cached_tokens;
  root.replaceChildren(
    item(duration(ttft), "to first token"),
    ...(tokens > 1 && span > 0 ? [item(((tokens - 1) / (span / 1000)).toFixed(1), "tok/s")] : []),
    item(count(tokens), tokens === 1 ? "token" : "tokens"),
    item(`${count(cached)} of ${count(usage.prompt_tokens)}`, "prompt tokens cached"),
    make("span", "", reason === "length" ? "stopped at the token limit" : "ended by itself"),
  );
}

/** Runs `work(signal)` for a form: buttons, abort, errors into `fail`. */
function running(form, work) {
  const run = form.querySelector("[data-run]");
  const stop = form.querySelector("[data-stop]");
  let controller = null;
  stop.addEventListener("click", () => controller?.abort());
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (controller) return;
    controller = new AbortController();
    run.disabled = true;
    stop.disabled = false;
    try {
      await work(controller.signal);
    } finally {
      controller = null;
      run.disabled = false;
      stop.disabled = true;
    }
  });
}

async function guarded(card, stats, work) {
  card.classList.add("busy");
  try {
    return await work();
  } catch (error) {
    const stopped = error.name === "AbortError";
    stats.replaceChildren(make("span", stopped ? "" : "failed", stopped ? "stopped by you" : error.message));
    return null;
  } finally {
    card.classList.remove("busy");
  }
}

function wireCompletion() {
  const prompt = byId("prompt");
  const answers = byId("answers");
  running(byId("complete-form"), async (signal) => {
    const given = prompt.value;
    const target = make("span");
    const stats = make("div", "stats", "waiting for the first token…");
    stats.setAttribute("role", "status");
    const card = make("li", "answer", make("div", "text", make("span", "given", given), target), stats);
    answers.prepend(card);
    while (answers.children.length > KEPT) answers.lastChild.remove();
    const body = { prompt: given, ...options() };
    const text = (choice) => choice.text;
    await guarded(card, stats, () => stream("/v1/completions", body, { target, stats, signal, text }));
    if (target.textContent) {
      const further = make("button", "", "Continue from here");
      further.type = "button";
      further.addEventListener("click", () => {
        prompt.value = given + target.textContent;
        prompt.focus();
        prompt.scrollTop = prompt.scrollHeight;
      });
      stats.append(further);
    }
  });
}

function wireChat() {
  const input = byId("message");
  const list = byId("messages");
  let conversation = [];
  byId("chat-new").addEventListener("click", () => {
    conversation = [];
    list.replaceChildren();
    input.focus();
  });
  running(byId("chat-form"), async (signal) => {
    const said = input.value.trim();
    if (!said) return;
    const mine = conversation;
    input.value = "";
    list.append(make("li", "message user", make("div", "text", said)));
    const target = make("div", "text");
    const stats = make("div", "stats", "waiting for the first token…");
    stats.setAttribute("role", "status");
    const card = make("li", "message assistant", target, stats);
    list.append(card);
    card.scrollIntoView({ block: "nearest" });
    const body = { messages: [...mine, { role: "user", content: said }], ...options() };
    const text = (choice) => choice.delta.content;
    await guarded(card, stats, () => stream("/v1/chat/completions", body, { target, stats, signal, text }));
    if (target.textContent) {
      mine.push({ role: "user", content: said }, { role: "assistant", content: target.textContent });
    } else {
      input.value = said; // nothing was answered: let it be sent again
    }
  });
}

function wireTabs() {
  const tabs = [byId("tab-complete"), byId("tab-chat")];
  const select = (chosen) => {
    for (const tab of tabs) {
      const on = tab === chosen;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = !on;
    }
    byId("answers").hidden = chosen !== tabs[0];
  };
  for (const tab of tabs) {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = tabs.find((t) => t !== tab && !t.hidden);
      if (other) {
        select(other);
        other.focus();
      }
    });
  }
  return select;
}

let introduced = false;

/** Fit the page to the model, once: name, tabs, note. */
export function introduce(state, select) {
  if (introduced) return;
  introduced = true;
  const { model } = state;
  document.title = `${model.id} · Cygnet`;
  const base = model.kind === "base";
  const facts = [model.id, base ? "" : model.description, `context ${count(state.max_model_len)} tokens`];
  byId("model").textContent = facts.filter(Boolean).join(" · ");
  byId("tab-chat").hidden = !state.has_chat_template;
  const note = byId("note");
  if (base) {
    note.textContent = model.description || `${model.id} is a base model: it continues text and was not trained to chat. Completions are sensible; ${state.has_chat_template ? "chat rambles." : "there is no chat."}`;
    note.hidden = false;
  } else if (state.has_chat_template) {
    select(byId("tab-chat"));
  }
}

export function wirePlayground() {
  wireCompletion();
  wireChat();
  return wireTabs();
}
