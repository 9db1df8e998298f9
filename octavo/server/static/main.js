// Tabs: each view is a module, loaded when the view is first opened. It may export show(argument) and
// hide(), called each time that the view is opened and left.
import {askKey, byId, failure, open, say} from "./api.js";

const VIEWS = ["chat", "engine", "explain", "bench"];
const loaded = {};
let current = null;

async function showView() {
  const [name, argument = ""] = location.hash.slice(2).split("/");
  const view = VIEWS.includes(name) ? name : "chat";
  if (current !== view) loaded[current]?.hide?.();
  current = view;
  for (const other of VIEWS) {
    const tab = byId(`tab-${other}`);
    tab.setAttribute("aria-selected", String(other === view));
    tab.tabIndex = other === view ? 0 : -1;
    byId(other).hidden = other !== view;
  }
  try {
    loaded[view] ??= await import(`./${view}.js`);
    if (current === view) loaded[view].show?.(decodeURIComponent(argument));
  } catch (error) { byId(view).append(failure(`The view failed: ${error.message}`)); }
}

for (const view of VIEWS) byId(`tab-${view}`).addEventListener("click", () => open(view));
document.querySelector("[role=tablist]").addEventListener("keydown", event => {
  const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  if (!step) return;
  const next = VIEWS.at((VIEWS.indexOf(current) + step) % VIEWS.length);
  byId(`tab-${next}`).focus();
  open(next);
});
byId("key").addEventListener("click", async () => {
  if (await askKey("The API key for this server. Leave it empty to send none.")) say("Key saved.");
});

function setTheme(theme) {
  localStorage.setItem("theme", document.documentElement.dataset.theme = theme);
  byId("theme").textContent = `Theme: ${theme}`;
}
setTheme(localStorage.getItem("theme") ?? "auto");
const NEXT_THEME = {auto: "dark", dark: "light", light: "auto"};
byId("theme").addEventListener("click", () => setTheme(NEXT_THEME[document.documentElement.dataset.theme]));
addEventListener("hashchange", showView);
showView();
