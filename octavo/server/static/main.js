// Tabs: each view is a module with mount(element, api), called when the view is first opened. mount
// may return {show(argument), hide()}, called each time that the view is opened and left.

import {api, askKey, byId, el, say} from "./api.js";

const VIEWS = ["chat", "engine", "explain", "bench"];
const mounted = {};
let current = null;

async function open() {
  const [name, argument = ""] = location.hash.slice(2).split("/");
  const view = VIEWS.includes(name) ? name : "chat";
  if (current !== view) mounted[current]?.hide?.();
  current = view;
  for (const other of VIEWS) {
    const tab = byId(`tab-${other}`);
    tab.setAttribute("aria-selected", String(other === view));
    tab.tabIndex = other === view ? 0 : -1;
    byId(other).hidden = other !== view;
  }
  const panel = byId(view);
  try {
    mounted[view] ??= (await import(`./${view}.js`)).mount(panel, api) ?? {};
    if (current === view) mounted[view].show?.(decodeURIComponent(argument));
  } catch (error) { panel.append(el("p", {class: "error"}, `The view failed: ${error.message}`)); }
}

for (const view of VIEWS) byId(`tab-${view}`).addEventListener("click", () => api.open(view));
document.querySelector("[role=tablist]").addEventListener("keydown", event => {
  const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  if (!step) return;
  const next = VIEWS.at((VIEWS.indexOf(current) + step) % VIEWS.length);
  byId(`tab-${next}`).focus();
  api.open(next);
});
byId("key").addEventListener("click", async () => {
  if (await askKey("The API key for this server. Leave it empty to send none.")) say("Key saved.");
});

function setTheme(theme) {
  localStorage.setItem("theme", document.documentElement.dataset.theme = theme);
  byId("theme").textContent = {auto: "Theme: auto", dark: "Dark", light: "Light"}[theme];
}
setTheme(localStorage.getItem("theme") ?? "auto");
const NEXT_THEME = {auto: "dark", dark: "light", light: "auto"};
byId("theme").addEventListener("click", () => setTheme(NEXT_THEME[document.documentElement.dataset.theme]));
addEventListener("hashchange", open);
open();
