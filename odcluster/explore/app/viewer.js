// One image, large: what is known of it, and what can be done with it. Left and right go through the list it came from.

import { askAndMove, describe, excludeImages, includeImages } from "./actions.js";
import { button, el, pixels, share, thumbnail } from "./dom.js";
import { complain, dialog } from "./notices.js";
import { clusterName } from "./store.js";

/** Show an image; `step(by)` gives the neighbour in the list, or undefined. */
export function view(image, step = () => undefined) {
  const picture = el("img", { class: "large", alt: "" });
  const facts = el("div", { class: "facts" });
  const before = button({ icon: "back", label: "Image before (←)", class: "turn", onclick: () => go(-1) });
  const after = button({ icon: "next", label: "Next image (→)", class: "turn", onclick: () => go(1) });
  const box = dialog("Image", "viewer", el("div", { class: "stage" }, before, picture, after), facts);
  const heading = box.querySelector("h2");
  let shown = image;

  async function go(by) {
    const next = await step(by);
    if (next) show(next);
  }

  async function show(next) {
    shown = next;
    picture.src = `/image/${next.id}`;
    heading.textContent = next.name ?? `image ${next.id}`;
    picture.alt = heading.textContent;
    facts.replaceChildren();
    try {
      const known = await describe(next.id);
      if (shown === next) tell(known);
    } catch (error) {
      complain(error);
    }
  }

  function tell(known) {
    heading.textContent = known.name;
    picture.alt = known.name;
    const after = async (edit) => (await edit) && show(known);
    const cluster = el("a", { href: `#/cluster/${known.cluster}`, onclick: () => box.close() });
    cluster.textContent = clusterName(known.cluster, known.cluster_name);
    const words = [pixels(known)];
    if (known.similarity !== null && known.similarity !== undefined) words.push(`similarity to the centre ${share(known.similarity)}`);
    if (known.outlier) words.push("an outlier");
    if (known.moved) words.push("moved by hand");
    if (known.excluded) words.push("excluded");
    facts.replaceChildren(
      el("p", {}, known.cluster >= 0 ? cluster : "In no cluster", el("span", { class: "quiet" }, ` · ${words.join(" · ")}`)),
      el(
        "p",
        { class: "row" },
        button({ icon: "similar", title: "s", onclick: similar }, "Find similar"),
        button({ onclick: () => after(askAndMove([known.id])) }, "Move to …"),
        known.excluded
          ? button({ onclick: () => after(includeImages([known.id])) }, "Include again")
          : button({ title: "x", onclick: () => after(excludeImages([known.id])) }, "Exclude"),
      ),
    );
    if (known.duplicates?.length) {
      const copies = known.duplicates.slice(0, 24).map((id) => {
        const open = button({ class: "small-picture", "aria-label": `Open image ${id}`, onclick: () => show({ id }) });
        open.append(thumbnail(id, 96, ""));
        return open;
      });
      facts.append(el("p", { class: "quiet" }, "Near-duplicates"), el("div", { class: "row" }, ...copies));
    }
  }

  function similar() {
    box.close();
    location.hash = `#/similar/${shown.id}`;
  }

  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "INPUT") return;
    const act = { ArrowLeft: () => go(-1), ArrowRight: () => go(1), s: similar }[event.key];
    if (event.key === "x") excludeImages([shown.id]).then((done) => done && show(shown));
    else if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act?.();
  });
  show(image);
}

/** How a viewer walks through a grid. */
export function walk(grid, item) {
  let index = grid.active;
  for (const [at, node] of grid.nodes) if (node.dataset.key === String(item.id)) index = at;
  return async (by) => {
    const to = index + by;
    if (to < 0 || to >= grid.total) return undefined;
    await grid.fetchPage(Math.floor(to / grid.pageSize));
    index = to;
    grid.active = to;
    return grid.item(to);
  };
}
