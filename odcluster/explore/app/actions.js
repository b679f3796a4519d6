// Edits: each is one request; the server keeps them in a log that can be undone. Nothing here touches images.

import { get, post } from "./api.js";
import { el, images, sentence } from "./dom.js";
import { complain, say } from "./notices.js";
import { pickClusters } from "./picker.js";
import { clusterName, look } from "./store.js";

/** Send an edit and say what happened, with a button to undo it. Returns whether it was done. */
async function edit(body, message) {
  try {
    await post("/api/edits", body);
    say(message, { label: "Undo", run: undo });
    look().catch(complain); // not waited for: whoever asked may clear a selection before the page shows the new state
    return true;
  } catch (error) {
    complain(error);
    if (error.status === 409) await look().catch(complain);
    return false;
  }
}

function nameCluster(card, name) {
  const named = name ? `Cluster ${card.id} is now called “${name}”.` : `Cluster ${card.id} has no name any more.`;
  return edit({ action: "name", cluster: card.id, name, expected: card.name }, named);
}

export function reviewCluster(card) {
  const message = `${clusterName(card.id, card.name)}: ${card.reviewed ? "not reviewed any more" : "reviewed"}.`;
  return edit({ action: "review", cluster: card.id, reviewed: !card.reviewed }, message);
}

/** Merge all into the first. */
export function mergeClusters(cards) {
  const [first, ...others] = cards;
  const names = others.map((card) => clusterName(card.id, card.name)).join(", ");
  const message = `Merged ${names} into ${clusterName(first.id, first.name)}.`;
  return edit({ action: "merge", clusters: cards.map((card) => card.id) }, message);
}

export function moveImages(ids, to) {
  const target = to === "new" ? "a new cluster" : clusterName(to);
  return edit({ action: "move", images: ids, to }, `Moved ${images(ids.length)} to ${target}.`);
}

export function excludeImages(ids) {
  return edit({ action: "exclude", images: ids }, `Excluded ${images(ids.length)}.`);
}

export function includeImages(ids) {
  return edit({ action: "include", images: ids }, `Included ${images(ids.length)} again.`);
}

async function step(path, before) {
  try {
    const answer = await post(path);
    say(sentence(`${before}: ${answer.undone ?? answer.redone ?? ""}`));
    await look();
  } catch (error) {
    complain(error);
  }
}

export function undo() {
  return step("/api/undo", "Undone");
}

export function redo() {
  return step("/api/redo", "Done again");
}

/** Ask for a cluster, then move the images there. Returns whether they were moved. */
export async function askAndMove(ids, suggestions = []) {
  const picked = await pickClusters({
    title: `Move ${images(ids.length)} to …`,
    suggestions,
    confirm: null,
    extra: { label: "New cluster", value: "new" },
  });
  if (picked === null) return false;
  return moveImages(ids, picked === "new" ? "new" : picked[0].id);
}

/** Ask which clusters to merge into this one. */
export async function askAndMerge(card, suggestions = []) {
  const picked = await pickClusters({
    title: `Merge into ${clusterName(card.id, card.name)}`,
    suggestions,
    without: card.id,
    confirm: (count) => (count === 1 ? "Merge 1 cluster" : `Merge ${count} clusters`),
  });
  return picked !== null && picked.length > 0 && mergeClusters([card, ...picked]);
}

/** A name that becomes a text field when clicked (or by the key n): Enter saves, Esc leaves it as it was. */
export function nameField(card, heading = false) {
  const shown = el("button", { type: "button", class: card.name ? "name" : "name unnamed", title: "Rename (n)" });
  shown.textContent = clusterName(card.id, card.name);
  const place = el(heading ? "h1" : "div", { class: "name-field" }, shown);
  shown.addEventListener("click", start);

  function start() {
    const field = el("input", { type: "text", class: "name-input", maxlength: "200", autocomplete: "off" });
    field.setAttribute("aria-label", `Name of cluster ${card.id}`);
    field.placeholder = `cluster ${card.id}`;
    field.value = card.name;
    place.replaceChildren(field);
    field.focus({ preventScroll: true });
    field.select();
    let over = false;
    const finish = async (save) => {
      if (over) return;
      over = true;
      const name = field.value.trim();
      place.replaceChildren(shown);
      if (!save || name === card.name) return;
      shown.textContent = clusterName(card.id, name);
      if (!(await nameCluster(card, name))) shown.textContent = clusterName(card.id, card.name);
    };
    field.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
      event.preventDefault();
      const holder = place.closest("[data-key]");
      finish(event.key === "Enter");
      (holder?.querySelector("[data-main]") ?? shown).focus({ preventScroll: true });
    });
    field.addEventListener("blur", () => finish(true));
  }
  place.startEditing = start;
  return place;
}

/** Everything the server knows of one image. */
export function describe(id) {
  return get(`/api/images/${id}`);
}
