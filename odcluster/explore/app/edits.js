// The log of edits, newest first, with undo and redo.

import { redo, undo } from "./actions.js";
import { get } from "./api.js";
import { button, el, sentence } from "./dom.js";

export function edits() {
  const list = el("ol", { class: "edits" });
  const undoing = button({ icon: "undo", title: "Ctrl + Z", onclick: undo }, "Undo");
  const redoing = button({ icon: "redo", title: "Ctrl + Shift + Z", onclick: redo }, "Redo");
  const about = "Edits are kept in curation.sqlite in the run directory. They change neither images nor training; exports use them.";
  const element = el(
    "section",
    { class: "narrow" },
    el("h1", {}, "Edits"),
    el("p", { class: "quiet" }, about),
    el("div", { class: "row" }, undoing, redoing),
    list,
  );

  async function refresh() {
    const answer = await get("/api/edits");
    undoing.disabled = !answer.edits.some((edit) => !edit.undone);
    redoing.disabled = !answer.edits.some((edit) => edit.undone);
    const rows = answer.edits.map((edit) =>
      el("li", { class: edit.undone ? "undone" : null }, el("span", {}, sentence(edit.text)), el("span", { class: "quiet" }, edit.undone ? "undone" : when(edit.time))),
    );
    list.replaceChildren(...(rows.length ? rows : [el("li", { class: "quiet" }, "No edits yet. Name a cluster (n), mark it as reviewed (r) or merge some (m).")]));
  }

  return { title: "Edits", element, refresh, keys: {}, close: () => {} };
}

function when(time) {
  const date = new Date(typeof time === "number" ? time * 1000 : time);
  return Number.isNaN(date.getTime()) ? String(time) : date.toLocaleString();
}
