// A dialog to choose one cluster (moving images) or several (merging): suggestions first, search by name or number.

import { get, query } from "./api.js";
import { button, el, images, thumbnail } from "./dom.js";
import { complain, dialog } from "./notices.js";
import { clusterName } from "./store.js";

/**
 * Resolves to a list of cards, to `extra.value`, or to null when closed.
 * `confirm` makes the words of the button that ends choosing several; without it the first click decides.
 */
export function pickClusters({ title, suggestions, confirm, without = null, extra = null }) {
  return new Promise((resolve) => {
    const chosen = new Map();
    let result = null;
    const search = el("input", { type: "search", placeholder: "Name or number", "aria-label": "Search clusters" });
    const list = el("ul", { class: "choices" });
    const done = el("button", { type: "button", class: "primary", disabled: true });
    const foot = el("div", { class: "dialog-foot" });
    if (extra) foot.append(button({ icon: "plus", onclick: () => end(extra.value) }, extra.label));
    if (confirm) foot.append(done);
    const box = dialog(title, "picker", search, list, foot);

    function end(value) {
      result = value;
      box.close();
    }

    function choose(card, row) {
      if (!confirm) return end([card]);
      if (chosen.has(card.id)) chosen.delete(card.id);
      else chosen.set(card.id, card);
      row.setAttribute("aria-pressed", chosen.has(card.id));
      label();
      return undefined;
    }

    function label() {
      done.disabled = chosen.size === 0;
      done.textContent = confirm ? confirm(chosen.size || 1) : "";
    }

    function show(cards) {
      const shown = [...chosen.values(), ...cards.filter((card) => !chosen.has(card.id))];
      const rows = shown.filter((card) => card.id !== without).map((card) => {
        const pictures = card.examples.slice(0, 4).map((id) => thumbnail(id, 96, ""));
        const row = el("button", { type: "button", class: "choice" });
        if (confirm) row.setAttribute("aria-pressed", chosen.has(card.id));
        row.append(el("span", { class: "strip" }, ...pictures));
        row.append(el("span", { class: "choice-name" }, clusterName(card.id, card.name)));
        row.append(el("span", { class: "quiet" }, images(card.size)));
        row.addEventListener("click", () => choose(card, row));
        return el("li", {}, row);
      });
      list.replaceChildren(...(rows.length ? rows : [el("li", { class: "quiet" }, "No cluster has such a name.")]));
    }

    let latest = 0;
    async function find() {
      const text = search.value.trim();
      const mine = ++latest;
      try {
        if (!text && suggestions.length) return show(suggestions);
        const found = await get(`/api/clusters?${query({ sort: "size", order: "desc", search: text, per_page: 30 })}`);
        if (mine === latest) show(found.clusters);
      } catch (error) {
        complain(error);
      }
      return undefined;
    }

    let timer = 0;
    search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(find, 150);
    });
    search.addEventListener("keydown", async (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      clearTimeout(timer);
      await find();
      list.querySelector("button")?.click();
    });
    done.addEventListener("click", () => end([...chosen.values()]));
    box.addEventListener("close", () => resolve(result));
    label();
    find();
    search.focus();
  });
}
