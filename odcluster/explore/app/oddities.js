// What falls out of the features: groups of near-duplicates, and images that fit no cluster well.

import { excludeImages } from "./actions.js";
import { get, query } from "./api.js";
import { imageTile } from "./cards.js";
import { button, el, number, share, thumbnail } from "./dom.js";
import { Grid } from "./grid.js";
import { complain } from "./notices.js";
import { selectionBar } from "./selection.js";
import { view, walk } from "./viewer.js";

const PAGE = 50;
const KINDS = { duplicates: "Near-duplicates", outliers: "Outliers" };
const ABOUT = {
  duplicates: "Images that are nearly the same. Keep the first of a group and exclude its copies with one click.",
  outliers: "Images that are far from the centre of their cluster, the strangest first. The number says how far, in usual deviations.",
};

export function oddities([wanted]) {
  const kind = wanted in KINDS ? wanted : "duplicates";
  const tabs = el("div", { class: "segments", role: "group", "aria-label": "Kind" });
  for (const [value, words] of Object.entries(KINDS)) {
    tabs.append(el("a", { href: `#/oddities/${value}`, "aria-current": value === kind ? "page" : null }, words));
  }
  const found = el("p", { class: "quiet" });
  const place = el("div", {});
  const element = el("section", {}, el("h1", {}, "Oddities"), el("div", { class: "toolbar" }, tabs, found), el("p", { class: "quiet" }, ABOUT[kind]), place);
  let timer = 0;
  let closed = false;

  /** The first page, or the words for waiting while the server still computes. */
  async function ask(page) {
    return get(`/api/oddities?${query({ kind, page, per_page: PAGE })}`);
  }

  function wait(text) {
    place.replaceChildren(el("p", { class: "empty" }, el("span", { class: "spinner" }), ` ${text}`));
    timer = setTimeout(() => refresh().catch(complain), 1500);
  }

  const inner = kind === "duplicates" ? duplicates(ask, place) : outliers(ask, place);

  async function refresh() {
    clearTimeout(timer);
    const first = await ask(0);
    if (closed) return;
    if (first.pending) {
      wait(first.pending);
      return;
    }
    found.textContent = kind === "duplicates" ? `${number(first.total)} groups` : `${number(first.total)} images`;
    await inner.show(first);
  }

  return {
    title: "Oddities",
    element,
    grid: inner.grid,
    refresh,
    keys: inner.keys,
    close: () => {
      closed = true;
      clearTimeout(timer);
      inner.close();
    },
  };
}

function duplicates(ask, place) {
  const list = el("ol", { class: "groups" });
  const more = button({ class: "more" }, "Show more");
  let pages = 1;
  more.addEventListener("click", () => {
    pages += 1;
    show().catch(complain);
  });

  async function show(first = null) {
    const answers = [first ?? (await ask(0))];
    for (let page = 1; page < pages; page++) answers.push(await ask(page));
    const groups = answers.flatMap((answer) => answer.groups ?? []);
    const rows = groups.map(groupRow);
    list.replaceChildren(...(rows.length ? rows : [el("li", { class: "quiet" }, "No near-duplicates were found.")]));
    more.hidden = groups.length >= answers[0].total;
    place.replaceChildren(list, more);
  }
  return { show, grid: null, keys: {}, close: () => {} };
}

function groupRow(group) {
  const pictures = group.ids.slice(0, 12).map((id, at) => {
    const open = button({ class: "small-picture", "aria-label": `Open image ${id}`, onclick: () => view({ id }, within(group.ids, id)) });
    open.append(thumbnail(id, 96, ""));
    if (at === 0) open.append(el("span", { class: "mark" }, "first"));
    return open;
  });
  const hidden = group.ids.length - pictures.length;
  const copies = group.ids.slice(1);
  return el(
    "li",
    { class: "group" },
    el("div", { class: "row" }, ...pictures, hidden > 0 ? el("span", { class: "quiet" }, `and ${number(hidden)} more`) : null),
    el("span", { class: "quiet" }, `similarity ${share(group.similarity)}`),
    button({ onclick: () => excludeImages(copies) }, copies.length === 1 ? "Exclude the copy" : `Exclude ${number(copies.length)} copies`),
  );
}

function within(ids, id) {
  let at = ids.indexOf(id);
  return (by) => {
    if (ids[at + by] === undefined) return undefined;
    at += by;
    return { id: ids[at] };
  };
}

function outliers(ask, place) {
  const open = (image) => view(image, walk(grid, image));
  const grid = new Grid({
    label: "Outliers",
    pageSize: PAGE,
    width: 132,
    gap: 8,
    selectable: true,
    open,
    load: ask,
    make: (image) => imageTile({ ...image, outlier: false }, open, image.score.toFixed(1)),
  });
  const bar = selectionBar(grid);
  const nothing = el("p", { class: "empty" }, "No outliers were found.");

  async function show() {
    if (grid.element.parentNode !== place) place.replaceChildren(nothing, grid.element, bar.element);
    await grid.reload();
    nothing.hidden = grid.total > 0;
  }
  return { show, grid, keys: bar.keys, close: () => grid.close() };
}
