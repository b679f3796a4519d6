// Short messages at the edge of the page, the banner when the server is gone, and the list of keys.

import { button, el } from "./dom.js";

/** Show a sentence for a while; `action` = {label, run} adds a button to it. */
export function say(sentence, action = null) {
  show("toast", sentence, action, 6000);
}

/** Show what went wrong. Anything that is not a sentence for people goes to the console as well. */
export function complain(error) {
  if (error.name === "AbortError") return;
  if (error.status === undefined) {
    console.error(error);
    show("toast bad", "Something in the page went wrong; reload it and try again.", null, 12000);
    return;
  }
  if (error.status === 0 || error.status === 403) banner(error.message);
  else show("toast bad", error.message, null, 12000);
}

function show(kind, sentence, action, milliseconds) {
  const area = document.getElementById("toasts");
  while (area.children.length > 2) area.firstChild.remove();
  const toast = el("div", { class: kind }, el("span", {}, sentence));
  if (action) {
    const run = () => {
      toast.remove();
      action.run();
    };
    toast.append(button({ onclick: run }, action.label));
  }
  toast.append(button({ icon: "close", label: "Close the message", class: "plain", onclick: () => toast.remove() }));
  area.append(toast);
  setTimeout(() => toast.remove(), milliseconds);
}

export function banner(sentence) {
  const area = document.getElementById("banner");
  if (area.textContent === sentence && !area.hidden) return;
  area.textContent = sentence;
  area.hidden = false;
}

export function noBanner() {
  document.getElementById("banner").hidden = true;
}

/** A modal dialog with a heading and a close button; it leaves the page when it closes. */
export function dialog(heading, kind, ...children) {
  const box = el("dialog", { class: kind, "aria-label": heading, tabindex: "-1", autofocus: true });
  const close = button({ icon: "close", label: "Close (Esc)", class: "plain", onclick: () => box.close() });
  box.append(el("div", { class: "dialog-head" }, el("h2", {}, heading), close), ...children);
  box.addEventListener("click", (event) => event.target === box && box.close());
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
  return box;
}

const KEYS = [
  ["← → ↑ ↓", "move between clusters or images"],
  ["Enter", "open what is marked"],
  ["Space", "select the marked image"],
  ["Shift + click", "select all from the last one to this"],
  ["Esc", "clear the selection, else go back"],
  ["/", "search clusters by name"],
  ["n", "name the cluster"],
  ["r", "mark the cluster as reviewed"],
  ["m", "merge clusters"],
  ["[ and ]", "the cluster before and after"],
  ["x", "exclude the selected images"],
  ["s", "find similar images"],
  ["l", "lasso on the map (or hold Shift and draw)"],
  ["Ctrl + Z", "undo the last edit"],
  ["Ctrl + Shift + Z", "redo it"],
  ["?", "this list"],
];

export function showKeys() {
  const rows = KEYS.map(([keys, meaning]) => [el("dt", {}, el("kbd", {}, keys)), el("dd", {}, meaning)]);
  dialog("Keys", "keys", el("dl", {}, ...rows.flat()));
}
