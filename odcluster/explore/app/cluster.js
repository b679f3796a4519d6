// One cluster: its images from the most to the least central, its neighbours, how its size changed.

import { askAndMerge, nameField, reviewCluster } from "./actions.js";
import { get, query } from "./api.js";
import { imageTile, tightnessBar } from "./cards.js";
import { sparkline } from "./charts.js";
import { button, el, images, number, share, thumbnail } from "./dom.js";
import { Grid } from "./grid.js";
import { address } from "./overview.js";
import { selectionBar } from "./selection.js";
import { clusterName } from "./store.js";
import { view, walk } from "./viewer.js";

const PAGE = 100;

export function cluster([text]) {
  const id = Number(text);
  let order = "central";
  let card = null;
  let nearest = [];
  const head = el("div", { class: "cluster-head" });
  const neighbours = el("div", { class: "neighbours" });
  const orders = el("div", { class: "segments", role: "group", "aria-label": "Order" });
  for (const [value, words] of [["central", "Most central first"], ["edge", "Least central first"]]) {
    orders.append(button({ "data-order": value, "aria-pressed": value === order, onclick: () => reorder(value) }, words));
  }
  const count = el("span", { class: "quiet" });
  const hint = el("span", { class: "quiet hint" }, "Click, Shift + click or drag to select; Enter opens.");

  const open = (image) => view(image, walk(grid, image));
  const grid = new Grid({
    label: "Images of the cluster",
    pageSize: PAGE,
    width: 132,
    gap: 8,
    selectable: true,
    open,
    load: async (page) => {
      const answer = await get(`/api/clusters/${id}?${query({ page, per_page: PAGE, order })}`);
      if (page === 0) tell(answer);
      return answer.images;
    },
    make: (image) => imageTile(image, open),
  });
  const bar = selectionBar(grid, { suggestions: () => nearest });

  const element = el("section", { class: "cluster" }, head, neighbours, el("div", { class: "toolbar" }, orders, count, hint), grid.element, bar.element);

  function tell(answer) {
    card = answer.cluster;
    nearest = answer.nearest;
    document.title = `${clusterName(card.id, card.name)} · odcluster`;
    count.textContent = images(answer.images.total);
    if (head.querySelector("input")) return; // a name is being typed
    const merged = card.merged.length ? ` · merged from ${card.merged.map((other) => `cluster ${other}`).join(", ")}` : "";
    head.replaceChildren(
      el("a", { class: "round", href: "#/", "aria-label": "Back to all clusters", title: "Back (Esc)" }, "←"),
      el(
        "div",
        { class: "cluster-title" },
        nameField(card, true),
        el("p", { class: "quiet" }, `${card.name ? `cluster ${card.id} · ` : ""}${images(card.size)} · tightness ${share(card.tightness)} `, tightnessBar(card), merged),
      ),
      ...history(answer.history),
      el(
        "div",
        { class: "row" },
        button({ icon: "back", label: "Cluster before ([)", onclick: () => neighbour(-1) }),
        button({ icon: "next", label: "Next cluster (])", onclick: () => neighbour(1) }),
        button({ icon: "merge", title: "m", onclick: merge }, "Merge"),
        el("a", { class: "button", href: `#/map?cluster=${id}` }, "On the map"),
        button({ icon: "check", class: "tick wide", "aria-pressed": card.reviewed, title: "r", onclick: () => reviewCluster(card) }, card.reviewed ? "Reviewed" : "Review"),
      ),
    );
    neighbours.replaceChildren(
      ...(nearest.length ? [el("h2", {}, "Nearest clusters"), el("ul", { class: "strip-list" }, ...nearest.map(nearCard))] : []),
    );
  }

  function merge() {
    return card && askAndMerge(card, nearest);
  }

  function reorder(value) {
    order = value;
    for (const segment of orders.children) segment.setAttribute("aria-pressed", segment.dataset.order === value);
    grid.active = 0;
    return grid.reload();
  }

  /** The cluster before or after this one, in the order of the overview. */
  async function neighbour(by) {
    for (let page = 0; ; page++) {
      const { clusters, total } = await get(address(page, 100));
      const at = clusters.findIndex((other) => other.id === id);
      if (at >= 0) {
        const to = page * 100 + at + by;
        if (to < 0 || to >= total) return;
        const target = clusters[at + by] ?? (await get(address(Math.floor(to / 100), 100))).clusters[to % 100];
        location.hash = `#/cluster/${target.id}`;
        return;
      }
      if (!clusters.length || (page + 1) * 100 >= total) break;
    }
    const { clusters } = await get(address(0, 1)); // filtered away meanwhile: go on with the first of the list
    if (clusters.length) location.hash = `#/cluster/${clusters[0].id}`;
  }

  return {
    title: `cluster ${id}`,
    element,
    grid,
    refresh: () => grid.reload(),
    keys: {
      ...bar.keys,
      n: () => head.querySelector(".name-field")?.startEditing(),
      r: () => card && reviewCluster(card),
      m: merge,
      "[": () => neighbour(-1),
      "]": () => neighbour(1),
      Escape: () => bar.keys.Escape() || (location.hash = "#/"),
    },
    close: () => grid.close(),
  };
}

function nearCard(near) {
  const name = clusterName(near.id, near.name);
  const link = el("a", { href: `#/cluster/${near.id}`, class: "near", "aria-label": `${name}, ${images(near.size)}, similarity ${share(near.similarity)}` });
  link.append(el("span", { class: "near-pictures" }, ...near.examples.slice(0, 4).map((id) => thumbnail(id, 96, ""))));
  link.append(el("span", { class: "near-name" }, name), el("span", { class: "quiet" }, share(near.similarity)));
  return el("li", {}, link);
}

function history(points) {
  if (!points || points.length < 2) return [];
  const [first, last] = [points[0][1], points[points.length - 1][1]];
  const words = `${number(first)} → ${number(last)} images over training`;
  return [el("figure", { class: "history" }, sparkline(points, words), el("figcaption", { class: "quiet" }, words))];
}
