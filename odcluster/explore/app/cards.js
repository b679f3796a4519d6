// Clusters as cards, and images as thumbnails: what grids are filled with.

import { nameField, reviewCluster } from "./actions.js";
import { button, el, icon, images, number, share, thumbnail } from "./dom.js";
import { clusterName } from "./store.js";

/** Height under the mosaic of a card; style.css has the same number. */
export const CAPTION = 74;

/** One cluster. `pick(card)` given: a click picks it (for merging) instead of opening it. */
export function clusterCard(card, { picked = null, pick = null } = {}) {
  const name = clusterName(card.id, card.name);
  const examples = card.examples.slice(0, card.examples.length >= 9 ? 9 : card.examples.length >= 4 ? 4 : 1);
  const mosaic = el("a", { class: `mosaic of${examples.length}`, href: `#/cluster/${card.id}`, "data-main": "" });
  mosaic.setAttribute("aria-label", `${pick ? "Pick" : "Open"} ${name}, ${images(card.size)}`);
  mosaic.append(...examples.map((id) => thumbnail(id, examples.length === 9 ? 96 : 192, "")));
  if (pick) {
    mosaic.setAttribute("role", "button");
    mosaic.setAttribute("aria-pressed", picked >= 0);
    mosaic.addEventListener("click", (event) => {
      event.preventDefault();
      pick(card);
    });
    if (picked >= 0) mosaic.append(el("span", { class: "badge" }, picked === 0 ? "into this" : icon("check")));
  }
  const tick = button({
    icon: "check",
    class: "tick",
    label: card.reviewed ? "Reviewed (r)" : "Mark as reviewed (r)",
    "aria-pressed": card.reviewed,
    onclick: () => reviewCluster(card),
  });
  const caption = el(
    "div",
    { class: "caption" },
    el("div", { class: "caption-row" }, nameField(card), tick),
    el("div", { class: "caption-row quiet" }, el("span", {}, images(card.size), changeMark(card)), tightnessBar(card)),
  );
  return el("li", { class: picked >= 0 && pick ? "card picked" : "card" }, mosaic, caption);
}

function changeMark(card) {
  if (!card.change) return null;
  const text = card.change > 0 ? ` ▲ ${number(card.change)}` : ` ▼ ${number(-card.change)}`;
  const title = `${images(Math.abs(card.change))} ${card.change > 0 ? "more" : "fewer"} than at the start of training`;
  return el("span", { class: card.change > 0 ? "change up" : "change down", title }, text);
}

export function tightnessBar(card) {
  const inner = el("span", { class: "bar-in" });
  inner.style.width = `${Math.round(100 * Math.max(0, Math.min(1, card.tightness ?? 0)))}%`;
  const title = `Tightness ${share(card.tightness)}: how close its images are to its centre, 1 is closest`;
  return el("span", { class: "bar", role: "img", "aria-label": `tightness ${share(card.tightness)}`, title }, inner);
}

/** One image in a selectable grid. `note` is a short text on it, such as a score. */
export function imageTile(image, open, note = null) {
  const name = image.name ?? `image ${image.id}`;
  const marks = [];
  if (image.excluded) marks.push(["excluded", "Excluded from all clusters"]);
  else if (image.outlier) marks.push(["outlier", "Far from the centre of its cluster"]);
  if (image.moved) marks.push(["moved", "Moved here by hand"]);
  const label = [name, ...marks.map(([mark]) => mark)].join(", ");
  return el(
    "li",
    { class: image.excluded ? "tile excluded" : "tile" },
    el("button", { type: "button", class: "picture", "data-main": "", title: name, "aria-label": label }, thumbnail(image.id, 192, "")),
    el("span", { class: "chosen", "aria-hidden": "true" }, icon("check")),
    marks.length ? el("span", { class: "marks" }, ...marks.map(([mark, title]) => el("span", { class: `mark ${mark}`, title }, mark))) : null,
    note === null ? null : el("span", { class: "note" }, note),
    button({ icon: "open", label: `Open ${name}`, class: "corner", onclick: () => open(image) }),
  );
}
