// The map: every image a point (and, close enough, a picture). Wheel, pinch and drag move it; a lasso selects.

import { describe } from "./actions.js";
import { getMap } from "./api.js";
import { imageTile } from "./cards.js";
import { button, el, images, number, thumbnail } from "./dom.js";
import { Grid } from "./grid.js";
import { listenToPointers } from "./gestures.js";
import { complain } from "./notices.js";
import { Overlay } from "./overlay.js";
import { colourOf, packed, Scatter } from "./scatter.js";
import { selectionBar } from "./selection.js";
import { clusterName, store } from "./store.js";
import { view, walk } from "./viewer.js";

const PALE = { light: packed([222, 223, 227]), dark: packed([52, 54, 60]) };

/** Where the map was left: it is there again when one comes back. */
const kept = { kind: null, zoom: 1, centre: { x: 0, y: 0 } };

export function map(_, parameters) {
  const only = parameters.has("cluster") ? Number(parameters.get("cluster")) : null;
  const points = el("canvas", { class: "points" });
  const over = el("canvas", { class: "over", tabindex: "0", role: "img", "aria-label": "Map of the images" });
  const tip = el("div", { class: "tip", hidden: true });
  const notice = el("p", { class: "map-notice" }, el("span", { class: "spinner" }), " Loading …");
  const kinds = el("div", { class: "segments", role: "group", "aria-label": "Kind of map" });
  const panButton = button({ icon: "hand", label: "Move the map", onclick: () => setMode("pan") });
  const lassoButton = button({ icon: "lasso", label: "Lasso: draw around images to select them (l)", onclick: () => setMode("lasso") });
  const modes = el("div", { class: "segments", role: "group", "aria-label": "Pointer" }, panButton, lassoButton);
  const zooms = el(
    "div",
    { class: "segments", role: "group", "aria-label": "Zoom" },
    button({ icon: "plus", label: "Zoom in (+)", onclick: () => zoom(1.5) }),
    button({ icon: "minus", label: "Zoom out (-)", onclick: () => zoom(1 / 1.5) }),
    button({ icon: "fit", label: "Show all (0)", onclick: fit }),
  );
  const all = button({ label: "Select all images on the screen", onclick: () => select(scatter.visible(Infinity)) }, "Select view");
  const info = el("p", { class: "map-info quiet" });
  const stage = el("div", { class: "stage-map" }, points, over, el("div", { class: "map-tools" }, kinds, modes, zooms, all), info, notice, tip);
  const panel = el("aside", { class: "panel", "aria-label": "Selected images", hidden: true });
  const element = el("section", { class: "map-view" }, stage, panel);

  let data = null;
  let about = "";
  let mode = "pan";
  let marked = null; // a Uint8Array over the points, or null
  let kind = kept.kind;
  let timer = 0;
  let closed = false;
  const scatter = new Scatter(points);
  scatter.zoom = kept.zoom;
  scatter.centre = { ...kept.centre };
  const overlay = new Overlay(over, scatter, () => redraw());

  // ---- data ----

  async function refresh() {
    clearTimeout(timer);
    const maps = store.run?.maps ?? [];
    if (!maps.length) {
      notice.textContent = "There is no map yet: it needs the features of all images.";
      return;
    }
    if (!maps.includes(kind)) kind = maps[0];
    drawKinds(maps);
    const answer = await getMap(kind);
    if (closed) return;
    if (answer.pending) {
      notice.replaceChildren(el("span", { class: "spinner" }), ` ${answer.pending}`);
      notice.hidden = false;
      timer = setTimeout(() => refresh().catch(complain), 1500);
      return;
    }
    notice.hidden = true;
    const same = data && data.ids.length === answer.ids.length && data.kind === kind;
    data = { ...answer, kind };
    scatter.setPoints(data);
    if (!same) marked = null;
    overlay.findLabels(store.names, only);
    const sampled = data.total > data.ids.length ? `${number(data.ids.length)} of ${images(data.total)}, drawn at random` : images(data.total);
    about = only === null ? sampled : `${sampled}; ${clusterName(only)} in colour`;
    over.setAttribute("aria-label", `Map of ${sampled}. Plus and minus zoom, arrows move it, l is the lasso.`);
    colour();
  }

  function drawKinds(maps) {
    const words = { pca: "PCA", umap: "UMAP" };
    const one = (value) => button({ "aria-pressed": value === kind, onclick: () => choose(value) }, words[value] ?? value);
    kinds.replaceChildren(...maps.map(one));
    kinds.hidden = maps.length < 2;
  }

  async function choose(value) {
    kind = value;
    fit();
    hidePanel();
    try {
      await refresh();
    } catch (error) {
      complain(error);
      if (closed || !data) return;
      kind = data.kind; // what is still shown
      drawKinds(store.run.maps);
    }
  }

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function colour() {
    const dark = isDark();
    const pale = dark ? PALE.dark : PALE.light;
    const palette = new Map();
    for (let i = 0; i < scatter.count; i++) {
      const cluster = scatter.clusters[i];
      let value = palette.get(cluster);
      if (value === undefined) palette.set(cluster, (value = packed(colourOf(cluster, dark))));
      const shown = marked ? marked[i] === 1 : only === null || cluster === only;
      scatter.faint[i] = shown ? 0 : 1;
      scatter.colours[i] = shown ? value : pale;
    }
    redraw();
  }

  // ---- drawing ----

  let scheduled = false;
  function redraw() {
    if (scheduled || closed) return;
    scheduled = true;
    requestAnimationFrame(() => {
      scheduled = false;
      if (closed || !scatter.count) return;
      const shown = scatter.draw();
      info.textContent = shown ? about : "Nothing is here; press 0 to see all.";
      overlay.draw(shown, isDark());
      Object.assign(kept, { kind, zoom: scatter.zoom, centre: { ...scatter.centre } });
    });
  }

  const observer = new ResizeObserver(() => {
    scatter.resize();
    overlay.resize();
    redraw();
  });
  observer.observe(stage);
  const recolour = () => colour();
  addEventListener("themechange", recolour);

  // ---- moving ----

  function zoom(factor, px = scatter.width / 2, py = scatter.height / 2) {
    scatter.zoomBy(factor, px, py);
    hideTip();
    redraw();
  }

  function fit() {
    scatter.fit();
    redraw();
  }

  function setMode(value) {
    mode = value;
    panButton.setAttribute("aria-pressed", mode === "pan");
    lassoButton.setAttribute("aria-pressed", mode === "lasso");
    over.classList.toggle("lassoing", mode === "lasso");
  }
  setMode("pan");

  listenToPointers(over, {
    lassoing: (event) => mode === "lasso" || event.shiftKey,
    pan: (dx, dy) => {
      scatter.panBy(dx, dy);
      hideTip();
      redraw();
    },
    zoom,
    lasso: (line) => {
      overlay.lasso = line;
      hideTip();
      redraw();
    },
    lassoed: (line) => {
      overlay.lasso = null;
      if (line.length > 2) select(scatter.inside(line));
      else redraw();
    },
    hover,
    tap: (px, py, touch) => {
      const at = scatter.pick(px, py, touch ? 20 : 9);
      if (at >= 0) view({ id: scatter.ids[at] });
      else if (marked) hidePanel();
    },
    leave: hideTip,
  });

  over.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    scatter.panBy(...moves[event.key]);
    redraw();
  });

  // ---- what is under the pointer ----

  let tipped = -1;
  let asking = 0;

  function hover(px, py) {
    const at = scatter.pick(px, py);
    if (at < 0) {
      hideTip();
      return;
    }
    const width = 176;
    tip.style.transform = `translate(${px + 16 + width > scatter.width ? Math.max(4, px - width - 16) : px + 16}px, ${Math.max(4, Math.min(py - 40, scatter.height - 236))}px)`;
    if (at === tipped) return;
    tipped = at;
    const id = scatter.ids[at];
    const name = el("span", { class: "filename" }, `image ${id}`);
    const picture = thumbnail(id, 192, "");
    picture.loading = "eager";
    tip.replaceChildren(picture, el("span", { class: "tip-cluster" }, clusterName(scatter.clusters[at])), name);
    tip.hidden = false;
    overlay.spot = at;
    redraw();
    clearTimeout(asking);
    asking = setTimeout(async () => {
      try {
        const known = await describe(id);
        name.textContent = known.name;
      } catch (error) {
        complain(error);
      }
    }, 120);
  }

  function hideTip() {
    clearTimeout(asking);
    if (tipped < 0) return;
    tipped = -1;
    overlay.spot = -1;
    tip.hidden = true;
    redraw();
  }

  // ---- what is selected ----

  let grid = null;
  let bar = null;

  function select(found) {
    grid?.close();
    if (!found.length) {
      hidePanel();
      return;
    }
    marked = new Uint8Array(scatter.count);
    for (const i of found) marked[i] = 1;
    const items = found.map((i) => ({ id: scatter.ids[i], cluster: scatter.clusters[i], excluded: scatter.clusters[i] < 0 }));
    const scroller = el("div", { class: "panel-list" });
    const open = (image) => view(image, walk(grid, image));
    grid = new Grid({
      label: "Selected images",
      pageSize: items.length,
      width: 84,
      gap: 6,
      selectable: true,
      scroller,
      open,
      load: async () => ({ total: items.length, items }),
      make: (image) => imageTile(image, open),
    });
    for (const item of items) grid.selection.set(item.id, item);
    bar = selectionBar(grid, { suggestions: () => [], done: hidePanel, inline: true });
    scroller.append(grid.element);
    const close = button({ icon: "close", label: "Close (Esc)", class: "plain", onclick: hidePanel });
    const title = el("h2", {}, "Selection");
    panel.replaceChildren(el("div", { class: "panel-head" }, title, close), el("p", { class: "quiet" }, mixture(items)), bar.element, scroller);
    panel.hidden = false;
    grid.reload().then(bar.update).catch(complain);
    setMode("pan");
    colour();
  }

  function hidePanel() {
    panel.hidden = true;
    grid?.close();
    grid = null;
    bar = null;
    marked = null;
    if (data) colour();
  }

  return {
    title: "Map",
    element,
    wide: true,
    refresh,
    keys: {
      l: () => setMode(mode === "lasso" ? "pan" : "lasso"),
      "+": () => zoom(1.5),
      "=": () => zoom(1.5),
      "-": () => zoom(1 / 1.5),
      0: fit,
      x: () => bar?.keys.x(),
      s: () => bar?.keys.s(),
      Escape: () => {
        if (mode === "lasso") setMode("pan");
        else if (grid) hidePanel();
        else return false;
        return true;
      },
    },
    close: () => {
      closed = true;
      clearTimeout(timer);
      observer.disconnect();
      removeEventListener("themechange", recolour);
      grid?.close();
    },
  };
}

/** "12 of cluster 3, 4 of dogs, 9 of 5 others". */
function mixture(items) {
  const counts = new Map();
  for (const { cluster } of items) counts.set(cluster, (counts.get(cluster) ?? 0) + 1);
  const ordered = [...counts].sort((a, b) => b[1] - a[1]);
  const words = ordered.slice(0, 3).map(([cluster, count]) => `${number(count)} of ${clusterName(cluster)}`);
  const rest = ordered.slice(3);
  if (rest.length) words.push(`${number(rest.reduce((sum, [, count]) => sum + count, 0))} of ${number(rest.length)} others`);
  return words.join(", ");
}
