// The page as a whole: which view is shown, keys, files that are dropped, and looking for changes every three seconds.

import { redo, undo } from "./actions.js";
import { cluster } from "./cluster.js";
import { button, el, icon, number } from "./dom.js";
import { edits } from "./edits.js";
import { map } from "./map.js";
import { banner, complain, noBanner, say, showKeys } from "./notices.js";
import { oddities } from "./oddities.js";
import { overview } from "./overview.js";
import { searchFile, similar } from "./similar.js";
import { look, onChange, store } from "./store.js";
import { training } from "./training.js";

const VIEWS = { "": overview, cluster, map, similar, oddities, training, edits };
const NAV = [
  ["", "Overview", "overview"],
  ["map", "Map", "map"],
  ["similar", "Similar", "similar"],
  ["oddities", "Oddities", "oddities"],
  ["training", "Training", "training"],
  ["edits", "Edits", "edits"],
];

const main = document.getElementById("main");
const nav = document.getElementById("nav");
let shown = null;

// ---- views ----

const scrolls = new Map(); // where each view was scrolled to, to be there again on the way back
let here = null;

async function route() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  if (here !== null) scrolls.set(here, scrollY);
  here = name === "" ? "" : path;
  shown?.close();
  document.querySelectorAll("dialog").forEach((open) => open.close());
  document.body.classList.remove("has-actions");
  const open = VIEWS[name] ?? overview;
  shown = open(rest, new URLSearchParams(search));
  const mine = shown;
  document.title = `${mine.title} · odcluster`;
  document.body.classList.toggle("wide", Boolean(mine.wide));
  main.replaceChildren(mine.element);
  for (const link of nav.children) {
    if (link.dataset.view === (name === "cluster" ? "" : name)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const restore = scrolls.get(here) ?? 0;
  scrollTo(0, 0);
  try {
    await mine.refresh();
    if (shown === mine && restore) scrollTo(0, restore);
  } catch (error) {
    if (shown !== mine || error.name === "AbortError") return;
    if (error.status === 404) missing(error);
    else complain(error);
  }
}

function missing(error) {
  const back = el("a", { class: "button", href: "#/" }, "All clusters");
  const hint = "If it was merged into another one, undo that or look for the other.";
  main.replaceChildren(el("div", { class: "empty" }, el("p", {}, `${error.message} ${hint}`), back));
}

function drawNav() {
  for (const [view, words, picture] of NAV) {
    nav.append(el("a", { href: `#/${view}`, "data-view": view }, icon(picture), el("span", {}, words)));
  }
  document.getElementById("tools").append(
    button({ icon: "undo", label: "Undo (Ctrl + Z)", class: "plain", onclick: undo }),
    button({ icon: "redo", label: "Redo (Ctrl + Shift + Z)", class: "plain", onclick: redo }),
    themeSwitch(),
    button({ icon: "help", label: "Keys (?)", class: "plain", onclick: showKeys }),
  );
}

function drawRun() {
  const { run } = store;
  document.getElementById("run-name").textContent = run.name;
  const state = document.getElementById("state");
  state.hidden = run.state !== "training";
  const share = run.total_steps ? ` ${Math.floor((100 * run.step) / run.total_steps)} %` : ` step ${number(run.step)}`;
  state.textContent = `training${share}`;
  shown?.describe?.();
}

// ---- light and dark ----

function themeSwitch() {
  const root = document.documentElement;
  const names = { auto: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
  const pictures = { auto: "auto", light: "sun", dark: "moon" };
  const control = button({ class: "plain", id: "theme" });
  const draw = () => {
    const now = root.dataset.theme ?? "auto";
    control.replaceChildren(icon(pictures[now]));
    control.title = names[now];
    control.setAttribute("aria-label", names[now]);
  };
  control.addEventListener("click", () => {
    const order = ["auto", "light", "dark"];
    const next = order[(order.indexOf(root.dataset.theme ?? "auto") + 1) % 3];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      localStorage.setItem("odcluster-theme", next);
    } catch {
      // Storage is switched off: the choice holds until the page is closed.
    }
    draw();
    dispatchEvent(new Event("themechange"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));
  draw();
  return control;
}

// ---- keys ----

addEventListener("keydown", (event) => {
  const { target } = event;
  if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (target.matches?.("input, textarea, select")) {
    if (event.key === "Escape") target.blur();
    return;
  }
  if ((event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "z") {
    event.preventDefault();
    if (event.shiftKey) redo();
    else undo();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "?") showKeys();
  else if (event.key === "/") search();
  else if (shown?.keys[event.key]) run(shown.keys[event.key], event.key);
  else if (event.key === "Escape") back();
  else if (event.key.startsWith("Arrow") && shown?.grid && !target.closest?.(".grid, canvas")) shown.grid.focus();
  else return;
  event.preventDefault();
});

async function run(action, key) {
  try {
    const done = await action();
    if (key === "Escape" && !done) back();
  } catch (error) {
    complain(error);
  }
}

function back() {
  if (shown?.title === "Overview") document.activeElement?.blur();
  else if (history.length > 1) history.back();
  else location.hash = "#/";
}

function search() {
  if (shown?.focusSearch) {
    shown.focusSearch();
    return;
  }
  location.hash = "#/";
  setTimeout(() => shown?.focusSearch?.(), 50);
}

// ---- files ----

const drop = document.getElementById("drop");

function holdsFiles(event) {
  return [...(event.dataTransfer?.types ?? [])].includes("Files");
}

function take(files) {
  const file = [...files].find((one) => one.type.startsWith("image/")) ?? files[0];
  if (!file) return;
  if (files.length > 1) say("Only the first image is looked for.");
  searchFile(file);
}

addEventListener("dragenter", (event) => holdsFiles(event) && (drop.hidden = false));
addEventListener("dragover", (event) => holdsFiles(event) && event.preventDefault());
addEventListener("dragleave", (event) => event.relatedTarget === null && (drop.hidden = true));
addEventListener("drop", (event) => {
  drop.hidden = true;
  if (!holdsFiles(event)) return;
  event.preventDefault();
  take(event.dataTransfer.files);
});
addEventListener("paste", (event) => {
  if (!event.clipboardData?.files.length) return;
  event.preventDefault();
  take(event.clipboardData.files);
});

// ---- looking for changes ----

onChange((what) => {
  if (what === "run") drawRun();
  else shown?.refresh().then(() => shown?.describe?.()).catch((error) => (error.status === 404 ? missing(error) : complain(error)));
});

async function watch() {
  if (!document.hidden) {
    try {
      await look();
      noBanner();
    } catch (error) {
      if (error instanceof TypeError) console.error(error);
      banner(error.message);
    }
  }
  setTimeout(watch, 3000);
}

async function start() {
  drawNav();
  try {
    await look();
  } catch (error) {
    main.replaceChildren();
    complain(error);
  }
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address after # is the view
    main.focus();
  });
  addEventListener("hashchange", route);
  await route();
  setTimeout(watch, 3000);
}

start();
