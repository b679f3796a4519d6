// The bar of what can be done with selected images, and the keys for it.

import { askAndMove, excludeImages, includeImages, moveImages } from "./actions.js";
import { button, el, images } from "./dom.js";

/**
 * Watches a grid of images: {element, keys, update}. `suggestions()` gives clusters to offer first when moving;
 * `done()` is called after an edit went through.
 */
export function selectionBar(grid, { suggestions = () => [], done = null, inline = false } = {}) {
  const element = el("div", { class: inline ? "actions inline" : "actions", role: "region", "aria-label": "Selected images", hidden: true });

  const ids = () => [...grid.selection.keys()];

  async function act(edit) {
    if (await edit) {
      grid.clear();
      done?.();
    }
  }

  function similar() {
    const id = grid.selection.size === 1 ? ids()[0] : grid.current?.id;
    if (id !== undefined) location.hash = `#/similar/${id}`;
  }

  /** The keys work on what is selected, else on the marked image. */
  function exclude() {
    if (grid.selection.size) return act(excludeImages(ids()));
    return grid.focusedIndex() !== null && grid.current ? act(excludeImages([grid.current.id])) : null;
  }

  function update() {
    const count = grid.selection.size;
    element.hidden = count === 0;
    if (!inline) document.body.classList.toggle("has-actions", count > 0);
    if (count === 0) return;
    const excluded = [...grid.selection.values()].filter((image) => image.excluded).length;
    element.replaceChildren(
      el("span", { class: "actions-text", "aria-live": "polite" }, `${images(count)} selected`),
      button({ onclick: () => act(askAndMove(ids(), suggestions())) }, "Move to …"),
      button({ onclick: () => act(moveImages(ids(), "new")) }, "New cluster"),
      excluded === count
        ? button({ onclick: () => act(includeImages(ids())) }, "Include again")
        : button({ onclick: exclude, title: "x" }, "Exclude"),
      ...(count === 1 ? [button({ onclick: similar, title: "s" }, "Find similar")] : []),
      button({ icon: "close", label: "Clear the selection (Esc)", class: "plain", onclick: () => grid.clear() }),
    );
  }

  grid.selected = update;
  return {
    element,
    update,
    keys: {
      x: exclude,
      s: similar,
      Escape: () => grid.selection.size > 0 && (grid.clear(), true),
    },
  };
}
