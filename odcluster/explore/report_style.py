"""Style and script of the report. The script only sorts and filters; without it everything is there."""

STYLE = """
:root { --paper: #fbfbfa; --card: #fff; --ink: #20242c; --muted: #626976; --rule: #e2e4e9; --line: #2463b4;
  --c1: #8a4fbd; --c2: #178a6a; --empty: #e6e8ec; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --paper: #15171c; --card: #1d2027; --ink: #e8eaee; --muted: #9aa1ad;
  --rule: #30343d; --line: #74aaf0; --c1: #c79bf0; --c2: #58cfae; --empty: #2a2e37; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.35rem; margin: 0 0 8px; }
h3 { font-size: 1rem; margin: 8px 0 0; overflow-wrap: anywhere; }
h3 small { color: var(--muted); font-weight: normal; }
p { margin: 0 0 12px; max-width: 75ch; }
a { color: var(--line); }
section { margin-top: 44px; scroll-margin-top: 56px; }
header p { color: var(--muted); }
nav { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 10px 0;
  background: var(--paper); border-bottom: 1px solid var(--rule); }
nav a { text-decoration: none; white-space: nowrap; }
nav a:hover { text-decoration: underline; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 8px; margin: 20px 0; }
.facts div { display: flex; flex-direction: column-reverse; justify-content: flex-end; background: var(--card);
  border: 1px solid var(--rule); border-radius: 10px; padding: 10px 14px; }
dt { color: var(--muted); font-size: .82rem; line-height: 1.3; }
dd { margin: 0; font-size: 1.15rem; font-weight: 600; overflow-wrap: anywhere; }
.extremes { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 8px 28px;
  margin-bottom: 20px; }
.extremes h3 { margin: 0; }
.extremes ol { list-style: none; margin: 4px 0; padding: 0; }
.extremes li { display: flex; justify-content: space-between; gap: 12px; padding: 3px 0;
  border-bottom: 1px solid var(--rule); }
.extremes a { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.extremes span { color: var(--muted); white-space: nowrap; font-variant-numeric: tabular-nums; }
.controls { display: flex; flex-wrap: wrap; gap: 8px 20px; align-items: center; margin: 0 0 14px; }
.controls[hidden] { display: none; }
.controls label, output { color: var(--muted); }
select, input { font: inherit; color: var(--ink); background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; padding: 4px 8px; }
:focus-visible { outline: 2px solid var(--line); outline-offset: 2px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(190px, 45%), 1fr)); gap: 16px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 10px; min-width: 0;
  scroll-margin-top: 64px; }
.card[hidden] { display: none; }
.card:target { border-color: var(--line); box-shadow: 0 0 0 1px var(--line); }
.card p { margin: 0; color: var(--muted); font-size: .9rem; }
.card .tight { display: flex; align-items: center; gap: 8px; font-variant-numeric: tabular-nums; }
.mosaic { display: grid; grid-template-columns: repeat(3, 1fr); gap: 3px; }
.tile { display: block; width: 100%; height: auto; aspect-ratio: 1; object-fit: cover; background: var(--empty);
  border-radius: 4px; }
.coarse { image-rendering: pixelated; }
meter { flex: 1; height: 8px; min-width: 0; }
meter::-webkit-meter-bar { background: var(--empty); border: 0; border-radius: 4px; height: 6px; }
meter::-webkit-meter-optimum-value { background: var(--line); border-radius: 4px; }
meter::-moz-meter-bar { background: var(--line); border-radius: 4px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); gap: 16px;
  margin-bottom: 12px; }
.charts > figure { max-width: 620px; }
figure { margin: 0; min-width: 0; }
.charts figure { display: flex; flex-direction: column-reverse; background: var(--card); border: 1px solid var(--rule);
  border-radius: 12px; padding: 12px; }
.charts figcaption { font-weight: 600; margin-bottom: 4px; }
.chart { width: 100%; height: auto; display: block; }
.chart text { font-size: 12px; fill: var(--muted); }
.grid { stroke: var(--rule); stroke-width: 1; }
.mark { stroke: var(--muted); stroke-width: 1; stroke-dasharray: 3 4; }
.line { fill: none; stroke: var(--line); stroke-width: 2; stroke-linejoin: round; }
.band { fill: var(--line); opacity: .22; }
.bar, .dot { fill: var(--line); }
.line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); }
.band.c1, .dot.c1 { fill: var(--c1); } .band.c2, .dot.c2 { fill: var(--c2); }
.chart text.c0 { fill: var(--line); } .chart text.c1 { fill: var(--c1); } .chart text.c2 { fill: var(--c2); }
.groups, .group { display: flex; flex-wrap: wrap; gap: 12px; }
.group { gap: 8px; background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 10px; }
.group figure { width: 96px; }
.odd { display: grid; grid-template-columns: repeat(auto-fill, minmax(100px, 1fr)); gap: 12px; }
.group .tile, .odd .tile { max-width: 140px; }
.group figcaption, .odd figcaption { font-size: .78rem; line-height: 1.3; color: var(--muted); margin-top: 3px;
  overflow-wrap: anywhere; }
.more { align-self: center; font-size: .85rem; color: var(--muted); margin: 0; }
details { margin: 14px 0; }
summary { cursor: pointer; color: var(--line); }
table { border-collapse: collapse; margin: 8px 0; max-width: 100%; }
th, td { text-align: left; padding: 3px 18px 3px 0; border-bottom: 1px solid var(--rule); overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px; white-space: pre-wrap;
  overflow-wrap: anywhere; }
@media (max-width: 560px) { main { padding: 20px 14px 48px; } h1 { font-size: 1.55rem; } .cards { gap: 10px; }
  .card { padding: 7px; } nav { position: static; } .facts { grid-template-columns: repeat(2, 1fr); } }
@media print { :root { --paper: #fff; --card: #fff; --ink: #000; --muted: #444; --rule: #bbb; --line: #2463b4; }
  nav, .controls { display: none; } main { max-width: none; padding: 0; }
  .card, .group, figure { break-inside: avoid; } section { break-before: auto; } body { font-size: 12px; }
  .cards { grid-template-columns: repeat(5, 1fr); } }
"""

SCRIPT = """
(() => {
  const cards = document.getElementById("cards"), sort = document.getElementById("sort");
  const find = document.getElementById("find"), found = document.getElementById("found");
  if (!cards || !sort) return;
  const all = [...cards.children];
  const value = (card, key) => key === "name" ? card.dataset.name : Number(card.dataset[key]);
  const arrange = () => {
    const key = sort.value, up = key === "name" || key === "id";
    const order = (a, b) => {
      const x = value(a, key), y = value(b, key);
      if (key === "name" && x !== y && (x === "" || y === "")) return x === "" ? 1 : -1;
      return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1) || value(a, "id") - value(b, "id");
    };
    const wanted = find.value.trim().toLowerCase();
    let shown = 0;
    for (const card of all.sort(order)) {
      const hit = wanted === "" || card.dataset.name.toLowerCase().includes(wanted) || card.dataset.id === wanted;
      card.hidden = !hit;
      shown += hit ? 1 : 0;
      cards.append(card);
    }
    found.textContent = wanted === "" ? "" : shown + " of " + all.length;
  };
  sort.addEventListener("change", arrange);
  find.addEventListener("input", arrange);
  sort.form.addEventListener("submit", (event) => event.preventDefault());
  sort.form.hidden = false;
})();
"""
