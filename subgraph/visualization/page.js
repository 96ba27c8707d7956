"use strict";
// The drawing can be moved and scaled; a click on a box, or a name in the search, shows what is
// known about the node. All texts of the model are set as text, never as markup.
const details = JSON.parse(document.getElementById("details").textContent);
const drawing = document.getElementById("drawing");
const panel = document.getElementById("panel");
const overview = document.getElementById("overview");
const search = document.getElementById("search");
const whole = drawing.viewBox.baseVal;
const size = { width: whole.width, height: whole.height };
const view = { x: 0, y: 0, scale: 1 };

function show() {
  const { clientWidth: width, clientHeight: height } = drawing.parentElement;
  drawing.setAttribute("viewBox",
    `${view.x} ${view.y} ${width / view.scale} ${height / view.scale}`);
}

function fit(all) {
  const { clientWidth: width, clientHeight: height } = drawing.parentElement;
  const least = all ? 0 : 0.6; // a large model begins readable, at its first box
  view.scale = Math.min(1.5, Math.max(least, Math.min(width / size.width, height / size.height)));
  const first = drawing.querySelector('[data-box="0"]');
  const { x, width: across } = all || !first ? { x: 0, width: size.width } : first.getBBox();
  const middle = size.width * view.scale <= width ? size.width / 2 : x + across / 2;
  view.x = middle - width / view.scale / 2;
  view.y = Math.min(0, (size.height - height / view.scale) / 2);
  show();
}

function zoom(factor, x, y) {
  const scale = Math.min(8, Math.max(0.002, view.scale * factor));
  view.x += x / view.scale - x / scale;
  view.y += y / view.scale - y / scale;
  view.scale = scale;
  show();
}

function zoomMiddle(factor) {
  const { clientWidth: width, clientHeight: height } = drawing.parentElement;
  zoom(factor, width / 2, height / 2);
}

function element(name, text, parent) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function select(number, move) {
  for (const old of drawing.querySelectorAll(".selected, .near")) {
    old.classList.remove("selected", "near");
  }
  panel.replaceChildren();
  overview.hidden = number !== null;
  if (number === null) return;
  const box = drawing.querySelector(`[data-box="${number}"]`);
  box.classList.add("selected");
  for (const edge of drawing.querySelectorAll(
    `[data-from="${number}"], [data-to="${number}"]`)) edge.classList.add("near");
  const { title, rows, why } = details[number];
  const back = element("a", "← overview", panel);
  back.addEventListener("click", () => select(null, false));
  element("h2", title, panel);
  if (why.length) {
    element("h3", "Why it is here", panel);
    const list = element("ul", undefined, panel);
    for (const reason of why) element("li", reason, list);
  }
  const table = element("table", undefined, panel);
  for (const [label, text] of rows) {
    const row = element("tr", undefined, table);
    element("th", label, row);
    element("td", text, row);
  }
  if (move) {
    const { x, y, width, height } = box.getBBox();
    const frame = drawing.parentElement;
    view.scale = Math.max(view.scale, 0.8);
    view.x = x + width / 2 - frame.clientWidth / view.scale / 2;
    view.y = y + Math.min(height / 2, frame.clientHeight / view.scale / 2) -
      frame.clientHeight / view.scale / 2;
    show();
  }
}

function find(words) {
  select(null, false);
  overview.hidden = Boolean(words);
  if (!words) return;
  const found = details.map((_, number) => number).filter((number) => {
    const { title, rows } = details[number];
    return `${title} ${rows.length ? rows[0][1] : ""}`.toLowerCase().includes(words.toLowerCase());
  });
  element("h3", `${found.length} found`, panel);
  const list = element("ul", undefined, panel);
  for (const number of found.slice(0, 200)) link(number, element("li", undefined, list));
}

function link(number, parent) {
  const { title, rows } = details[number];
  const made = element("a", title || "(no name)", parent);
  made.addEventListener("click", () => select(number, true));
  if (rows.length) parent.append(` ${rows[0][1]}`);
}

let grip = null;
drawing.addEventListener("pointerdown", (event) => {
  grip = { x: event.clientX, y: event.clientY, moved: false };
});
window.addEventListener("pointermove", (event) => {
  if (!grip) return;
  const [dx, dy] = [event.clientX - grip.x, event.clientY - grip.y];
  if (!grip.moved && Math.abs(dx) + Math.abs(dy) < 4) return;
  view.x -= dx / view.scale;
  view.y -= dy / view.scale;
  grip = { x: event.clientX, y: event.clientY, moved: true };
  show();
});
window.addEventListener("pointerup", (event) => {
  if (grip && !grip.moved) {
    const box = event.target.closest("[data-box]");
    select(box ? Number(box.dataset.box) : null, false);
  }
  grip = null;
});
drawing.addEventListener("wheel", (event) => {
  event.preventDefault();
  const { left, top } = drawing.parentElement.getBoundingClientRect();
  if (event.ctrlKey || event.metaKey) {
    zoom(Math.exp(-event.deltaY / 200), event.clientX - left, event.clientY - top);
  } else {
    view.x += event.deltaX / view.scale;
    view.y += event.deltaY / view.scale;
    show();
  }
}, { passive: false });
window.addEventListener("resize", show);
window.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { search.value = ""; find(""); }
});
search.addEventListener("input", () => find(search.value.trim()));
document.getElementById("larger").addEventListener("click", () => zoomMiddle(1.4));
document.getElementById("smaller").addEventListener("click", () => zoomMiddle(1 / 1.4));
document.getElementById("all").addEventListener("click", () => fit(true));
for (const named of overview.querySelectorAll("a[data-to-box]")) {
  named.addEventListener("click", () => select(Number(named.dataset.toBox), true));
}
fit(false);
