// All clusters as cards: sort, search, name, mark as reviewed, merge.

import { get, query } from "./api.js";
import { mergeClusters, reviewCluster } from "./actions.js";
import { CAPTION, clusterCard } from "./cards.js";
import { button, el, images, number, sentence } from "./dom.js";
import { Grid } from "./grid.js";
import { complain } from "./notices.js";
import { clusterName, store } from "./store.js";

const PAGE = 60;

const SORTS = {
  "size desc": "largest first",
  "size asc": "smallest first",
  "tightness desc": "tightest first",
  "tightness asc": "loosest first",
  "change desc": "grown most",
  "change asc": "shrunk most",
  "name asc": "by name",
  "id asc": "by number",
};

const SHOWS = { all: "All", named: "Named", unreviewed: "To review" };

/** How the list was last asked for, so that the cluster page knows what comes before and after. */
const listing = { sort: "size", order: "desc", search: "", show: "all" };

export function address(page, perPage = PAGE) {
  return `/api/clusters?${query({ ...listing, page, per_page: perPage })}`;
}

export function overview(_, parameters) {
  for (const key of Object.keys(listing)) if (parameters.has(key)) listing[key] = parameters.get(key);
  let merging = null;

  const search = el("input", {
    type: "search",
    id: "search",
    placeholder: "Search clusters   /",
    "aria-label": "Search clusters by name or number",
    value: listing.search,
  });
  const sort = el("select", { "aria-label": "Sort clusters" });
  for (const [value, words] of Object.entries(SORTS)) {
    sort.append(el("option", { value, selected: value === `${listing.sort} ${listing.order}` }, words));
  }
  const show = el("div", { class: "segments", role: "group", "aria-label": "Show" });
  for (const [value, words] of Object.entries(SHOWS)) {
    show.append(button({ "data-show": value, onclick: () => change({ show: value }) }, words));
  }
  const mergeButton = button({ icon: "merge", label: "Merge clusters (m)", class: "merge", "aria-pressed": false, onclick: toggleMerging }, el("span", {}, "Merge"));
  const summary = el("p", { class: "summary quiet" });
  const progress = el("span", { class: "bar wide", "aria-hidden": "true" }, el("span", { class: "bar-in" }));
  const notes = el("p", { class: "quiet", hidden: true });
  const empty = el("p", { class: "empty", hidden: true }, "No cluster fits. Clear the search or show all clusters.");
  const bar = el("div", { class: "actions", role: "region", "aria-label": "Merge clusters", hidden: true });

  const grid = new Grid({
    label: "Clusters",
    pageSize: PAGE,
    width: 204,
    below: CAPTION,
    gap: 18,
    load: async (page) => {
      const answer = await get(address(page));
      return { total: answer.total, items: answer.clusters };
    },
    state: (card) => (merging ? [...merging.keys()].indexOf(card.id) : null),
    make: (card) => clusterCard(card, merging ? { pick, picked: [...merging.keys()].indexOf(card.id) } : {}),
  });

  const element = el(
    "section",
    { class: "overview" },
    el("div", { class: "toolbar" }, search, show, sort, mergeButton),
    el("div", { class: "summary-row" }, summary, progress),
    notes,
    empty,
    grid.element,
    bar,
  );

  function describe() {
    const { run } = store;
    for (const segment of show.children) segment.setAttribute("aria-pressed", segment.dataset.show === listing.show);
    if (!run) return;
    const filtered = listing.search || listing.show !== "all";
    const found = filtered ? `${number(grid.total)} of ${number(run.clusters)} clusters` : `${number(run.clusters)} clusters`;
    summary.textContent = `${images(run.images)} in ${found} · ${number(run.reviewed)} reviewed`;
    progress.firstChild.style.width = `${(100 * run.reviewed) / Math.max(1, run.clusters)}%`;
    notes.textContent = (run.notes ?? []).map(sentence).join(" ");
    notes.hidden = !notes.textContent;
    empty.hidden = grid.total > 0;
  }

  async function refresh() {
    await grid.reload();
    describe();
  }

  function change(parts) {
    Object.assign(listing, parts);
    history.replaceState(null, "", `#/?${query(listing)}`);
    grid.active = 0;
    scrollTo(0, 0);
    refresh().catch(complain);
  }

  let timer = 0;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => change({ search: search.value.trim() }), 150);
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && search.value) search.value = "";
    else if (event.key === "ArrowDown" || event.key === "Enter") grid.focus(0);
    else if (event.key === "Escape") search.blur();
    else return;
    event.preventDefault();
    event.stopPropagation();
    clearTimeout(timer);
    if (search.value.trim() !== listing.search) change({ search: search.value.trim() });
  });
  sort.addEventListener("change", () => {
    const [key, order] = sort.value.split(" ");
    change({ sort: key, order });
  });

  // ---- merging: the first card that is picked takes in the others ----

  function toggleMerging() {
    merging = merging ? null : new Map();
    redraw();
  }

  function pick(card) {
    if (merging.has(card.id)) merging.delete(card.id);
    else merging.set(card.id, card);
    redraw();
  }

  function redraw() {
    mergeButton.setAttribute("aria-pressed", merging !== null);
    bar.hidden = merging === null;
    document.body.classList.toggle("has-actions", merging !== null);
    if (merging) {
      const cards = [...merging.values()];
      const words =
        cards.length === 0
          ? "Pick the clusters to merge; the first one keeps its name."
          : cards.length === 1
            ? `Into ${clusterName(cards[0].id, cards[0].name)}: pick more clusters.`
            : `${cards.length} clusters into ${clusterName(cards[0].id, cards[0].name)}`;
      bar.replaceChildren(
        el("span", { class: "actions-text" }, words),
        button({ class: "primary", disabled: cards.length < 2, onclick: merge }, "Merge"),
        button({ onclick: toggleMerging }, "Cancel"),
      );
    }
    grid.render();
  }

  async function merge() {
    const cards = [...merging.values()];
    if (cards.length < 2) return;
    if (await mergeClusters(cards)) toggleMerging();
  }

  return {
    title: "Overview",
    element,
    grid,
    refresh,
    describe,
    keys: {
      n: () => renameCurrent(grid),
      r: () => grid.current && reviewCluster(grid.current),
      m: () => {
        const card = grid.focusedIndex() === null ? null : grid.current;
        if (!merging) toggleMerging();
        if (card) pick(card);
      },
      Escape: () => merging && (toggleMerging(), true),
    },
    focusSearch: () => {
      search.focus();
      search.select();
    },
    close: () => grid.close(),
  };
}

function renameCurrent(grid) {
  if (!grid.current) return;
  grid.reveal(grid.active);
  grid.render();
  grid.nodes.get(grid.active)?.querySelector(".name-field")?.startEditing();
}
