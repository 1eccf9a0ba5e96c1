import { byId, key } from "./client.js";
import { follow, wireFlush } from "./live.js";
import { introduce, wirePlayground } from "./play.js";

const dialog = byId("key-dialog");

/** Ask for the key; resolves when one has been given, now or later. */
function askKey() {
  byId("key-open").hidden = false;
  byId("key").value = key.get();
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => byId("key-form").addEventListener("submit", resolve, { once: true }));
}

byId("key-form").addEventListener("submit", () => key.set(byId("key").value.trim()));
byId("key-open").addEventListener("click", askKey);
byId("key-open").hidden = !key.get();

const select = wirePlayground();
wireFlush();
follow((state) => introduce(state, select), askKey);
