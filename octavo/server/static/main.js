// Tabs. A view is a module; it may export show(argument) and hide().
import {arrow, askKey, byId, failure, open, say, sentence} from "./api.js";

const VIEWS = ["chat", "engine", "explain", "bench"];
const loaded = {};
// Files asked for before the first paint delay it.
const painted = new Promise(done => requestAnimationFrame(() => setTimeout(done)));
let current = null;

async function showView() {
  const [name, argument = ""] = location.hash.slice(2).split("/");
  const view = VIEWS.includes(name) ? name : "chat";
  loaded[current]?.hide?.();
  current = view;
  for (const other of VIEWS) {
    const tab = byId(`tab-${other}`);
    tab.ariaSelected = String(other === view);
    tab.tabIndex = other === view ? 0 : -1;
    byId(other).hidden = other !== view;
  }
  await painted;
  try {
    loaded[view] ??= await import(`./${view}.js`);
    byId(view).inert = false;
    if (current === view) loaded[view].show?.(decodeURIComponent(argument));
  } catch (error) { byId(view).append(failure(`The view failed: ${error.message}`)); }
}

for (const view of VIEWS) byId(`tab-${view}`).onclick = () => open(view);
document.querySelector("[role=tablist]").onkeydown = event => {
  if (!arrow(event)) return;
  const next = VIEWS.at((VIEWS.indexOf(current) + arrow(event)) % VIEWS.length);
  byId(`tab-${next}`).focus();
  open(next);
};
byId("key").onclick = async () => { if (await askKey(sentence("anyKey"))) { say("Key saved."); showView(); } };

const theme = byId("theme");
theme.onchange = () => localStorage.setItem("theme", document.documentElement.dataset.theme = theme.value);
theme.value = localStorage.getItem("theme") ?? "auto";
theme.onchange();
addEventListener("hashchange", showView);
showView();
await painted;
document.head.append(byId("modules").content);
