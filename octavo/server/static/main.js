// Tabs: each view is a module with mount(element, api), called when the view is first opened. mount
// may return {show(argument), hide()}, called each time that the view is opened and left.

import {api, askKey, el, say} from "./api.js";

const VIEWS = ["chat", "engine", "explain", "bench"];
const mounted = {};
let current = null;

async function open() {
  const [name, argument = ""] = location.hash.slice(2).split("/");
  const view = VIEWS.includes(name) ? name : "chat";
  if (current !== view) mounted[current]?.hide?.();
  current = view;
  for (const other of VIEWS) {
    const tab = document.getElementById(`tab-${other}`);
    tab.setAttribute("aria-selected", String(other === view));
    tab.tabIndex = other === view ? 0 : -1;
    document.getElementById(other).hidden = other !== view;
  }
  const panel = document.getElementById(view);
  try {
    mounted[view] ??= (await import(`./${view}.js`)).mount(panel, api) ?? {};
    if (current === view) mounted[view].show?.(decodeURIComponent(argument));
  } catch (error) {
    panel.append(el("p", {class: "error"}, `The view failed: ${error.message}`));
  }
}

document.querySelector("[role=tablist]").addEventListener("click", event => {
  const tab = event.target.closest("[role=tab]");
  if (tab) api.open(tab.getAttribute("aria-controls"));
});
document.querySelector("[role=tablist]").addEventListener("keydown", event => {
  const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  if (!step) return;
  const next = VIEWS.at((VIEWS.indexOf(current) + step) % VIEWS.length);
  document.getElementById(`tab-${next}`).focus();
  api.open(next);
});
document.getElementById("key").addEventListener("click", async () => {
  if (await askKey("The API key for this server. Leave it empty to send none.")) say("Key saved.");
});

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = {auto: "Theme: auto", dark: "Dark", light: "Light"}[theme];
}
setTheme(localStorage.getItem("theme") ?? "auto");
document.getElementById("theme").addEventListener("click", () => {
  const themes = ["auto", "dark", "light"];
  const next = themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % 3];
  localStorage.setItem("theme", next);
  setTheme(next);
});
addEventListener("hashchange", open);
open();
