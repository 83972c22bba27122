"use strict";
// Zooms into the panels of a search chart by dragging or by keys. Both panels of a chart show the same trials.
const SVG = "http://www.w3.org/2000/svg", PAD = 6, LEAST_DRAG = 8, LABEL_GAP = 3;

class Panel {
  constructor(svg) {
    this.svg = svg;
    this.plot = svg.querySelector(".plot");
    const size = name => this.plot[name].baseVal.value;
    this.left = size("x") + PAD; this.top = size("y") + PAD;
    this.right = this.left + size("width") - 2 * PAD; this.bottom = this.top + size("height") - 2 * PAD;
    const y = svg.dataset.y.split(" ");
    this.isLog = y[3] === "log"; this.scale = Number(y[2]);
    this.whole = {x: svg.dataset.x.split(" ").map(Number), y: y.slice(0, 2).map(Number)};
    this.view = this.whole;
    this.ticks = svg.querySelector(".ticks"); this.wholeTicks = this.ticks.innerHTML;
    this.marks = [...this.plot.querySelectorAll("[transform^=translate]")].map(mark => {
      const {e, f} = mark.transform.baseVal[0].matrix;
      return {mark, x: e, y: f};
    });
    this.paths = [...this.plot.querySelectorAll("path:not([transform])")];
    this.labels = [...svg.querySelectorAll(".label")].map(label => {
      const box = label.getBBox(), leader = label.previousElementSibling;
      const path = leader?.matches(".leader") ? leader : null;
      return {label, path, d: path?.getAttribute("d"), y: Number(label.dataset.y), top: box.y, height: box.height, x: box.x};
    });
    svg.tabIndex = 0;
    svg.setAttribute("aria-keyshortcuts", "+ - 0 ArrowLeft ArrowRight ArrowUp ArrowDown");
  }
  get isZoomed() { return this.view !== this.whole; }
  share(axis, value, range) {
    const [low, high] = range, log = axis === "y" && this.isLog;
    return log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  }
  value(axis, share) {
    const [low, high] = this.view[axis];
    return axis === "y" && this.isLog ? low * (high / low) ** share : low + share * (high - low);
  }
  x(value) { return this.left + this.share("x", value, this.view.x) * (this.right - this.left); }
  y(value) { return this.bottom - this.share("y", value, this.view.y) * (this.bottom - this.top); }
  at(event) {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse());
    return {x: clamp(point.x, this.left, this.right), y: clamp(point.y, this.top, this.bottom)};
  }
  draw() {
    const zoomed = this.isZoomed, {whole} = this;
    this.svg.classList.toggle("zoomed", zoomed);
    // The plot was drawn for the whole range: its pixels are moved and scaled to the view.
    const [x0, x1] = whole.x.map(value => this.x(value)), [y0, y1] = whole.y.map(value => this.y(value));
    const kx = (x1 - x0) / (this.right - this.left), ky = (y0 - y1) / (this.bottom - this.top);
    const dx = x0 - kx * this.left, dy = y1 - ky * this.top;
    for (const {mark, x, y} of this.marks) mark.setAttribute("transform", `translate(${(kx * x + dx).toFixed(1)} ${(ky * y + dy).toFixed(1)})`);
    for (const path of this.paths) path.setAttribute("transform", `matrix(${kx} 0 0 ${ky} ${dx} ${dy})`);
    if (zoomed) this.drawTicks(); else this.ticks.innerHTML = this.wholeTicks;
    this.placeLabels(y => ky * y + dy);
  }
  drawTicks() {
    this.ticks.replaceChildren();
    const add = (name, attributes, text = "") => {
      const element = document.createElementNS(SVG, name);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      element.textContent = text;
      this.ticks.append(element);
    };
    const [low, high] = this.view.y;
    for (const value of this.isLog && high / low > 10 ? decades(low, high) : rounded(low, high, 5)) {
      const y = this.y(value);
      add("path", {class: "grid", d: `M${this.left} ${y}H${this.right}`});
      add("text", {x: this.left - 8, y: y + 4, "text-anchor": "end"}, String(Number((value * this.scale).toPrecision(5))));
    }
    for (const value of rounded(...this.view.x, 6)) if (Number.isInteger(value)) {
      add("text", {x: this.x(value), y: this.bottom + 16, "text-anchor": "middle"}, String(value));
    }
  }
  placeLabels(move) {
    const shown = [];
    for (const label of this.labels) {
      label.wanted = move(label.y);
      const isIn = !this.isZoomed || (label.wanted >= this.top && label.wanted <= this.bottom);
      for (const part of [label.label, label.path]) part?.toggleAttribute("hidden", !isIn);
      label.label.removeAttribute("transform");
      if (label.path) label.path.setAttribute("d", label.d);
      if (isIn) shown.push(label);
    }
    if (!this.isZoomed) return;
    shown.sort((a, b) => a.wanted - b.wanted);
    let least = 0;
    for (const label of shown) {
      label.now = Math.max(label.wanted - label.height / 2, least);
      least = label.now + label.height + LABEL_GAP;
    }
    let most = this.bottom + PAD;
    for (const label of shown.reverse()) {
      label.now = Math.min(label.now, most - label.height);
      most = label.now - LABEL_GAP;
      label.label.setAttribute("transform", `translate(0 ${label.now - label.top})`);
      if (label.path) label.path.setAttribute("d", `M${this.right} ${label.wanted}L${label.x - 3} ${label.now + label.height / 2}`);
    }
  }
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function rounded(low, high, count) {
  const rough = (high - low) / count, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(digit => digit * size).find(step => step >= rough);
  const first = Math.ceil(low / step), last = Math.floor(high / step);
  return Array.from({length: Math.max(0, last - first + 1)}, (_, at) => Number(((first + at) * step).toPrecision(12)));
}

function decades(low, high) {
  const first = Math.ceil(Math.log10(low)), last = Math.floor(Math.log10(high));
  const digits = high / low > 1000 ? [1] : [1, 2, 5];
  const values = Array.from({length: last - first + 2}, (_, at) => digits.map(digit => digit * 10 ** (first - 1 + at))).flat();
  return values.filter(value => value >= low && value <= high);
}

function zoom(panel, group, x, y) {
  const inside = (range, whole) => [Math.max(range[0], whole[0]), Math.min(range[1], whole[1])];
  const set = (target, changes) => {
    const {whole} = target, view = {x: inside(changes.x, whole.x), y: inside(changes.y, whole.y)};
    if (view.x[1] - view.x[0] < 1 || !(view.y[1] / view.y[0] > 1.00001)) return;
    const same = ["x", "y"].every(axis => view[axis].every((value, at) => value === whole[axis][at]));
    target.view = same ? whole : view;
    target.draw();
  };
  for (const target of group) set(target, {x, y: target === panel ? y : target.view.y});
}

function reset(group) {
  for (const panel of group) { panel.view = panel.whole; panel.draw(); }
}

function setUpPanel(panel, group) {
  const {svg} = panel;
  let start = null, box = null, dragged = false;
  const ranges = (a, b) => {
    const value = (axis, share) => panel.value(axis, share);
    const across = [a.x, b.x].sort((p, q) => p - q).map(x => value("x", (x - panel.left) / (panel.right - panel.left)));
    const along = [a.y, b.y].sort((p, q) => q - p).map(y => value("y", (panel.bottom - y) / (panel.bottom - panel.top)));
    return [across, along];
  };
  svg.addEventListener("pointerdown", event => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    start = panel.at(event); dragged = false;
  });
  svg.addEventListener("pointermove", event => {
    if (!start) return;
    const now = panel.at(event);
    if (!box && Math.hypot(now.x - start.x, now.y - start.y) < LEAST_DRAG) return;
    if (!box) {
      box = svg.appendChild(document.createElementNS(SVG, "rect"));
      box.setAttribute("class", "selection");
      svg.setPointerCapture(event.pointerId);
      dragged = true;
    }
    const size = {x: Math.min(start.x, now.x), y: Math.min(start.y, now.y), width: Math.abs(now.x - start.x), height: Math.abs(now.y - start.y)};
    for (const [name, value] of Object.entries(size)) box.setAttribute(name, value);
  });
  const end = event => {
    if (box) {
      const now = panel.at(event), [x, y] = ranges(start, now);
      const isWide = Math.abs(now.x - start.x) >= LEAST_DRAG, isHigh = Math.abs(now.y - start.y) >= LEAST_DRAG;
      zoom(panel, group, isWide ? x : panel.view.x, isHigh ? y : panel.view.y);
    }
    box?.remove();
    start = box = null;
  };
  svg.addEventListener("pointerup", end);
  svg.addEventListener("pointercancel", () => { box?.remove(); start = box = null; });
  svg.addEventListener("dragstart", event => event.preventDefault());
  svg.addEventListener("click", event => { if (dragged) event.preventDefault(); dragged = false; }, true);
  svg.addEventListener("dblclick", () => reset(group));
  svg.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== svg) return;
    const moved = (low, high) => ["x", "y"].map((axis, at) => [panel.value(axis, low[at]), panel.value(axis, high[at])]);
    const actions = {
      "+": [[.15, .15], [.85, .85]], "=": [[.15, .15], [.85, .85]], "-": [[-.2, -.2], [1.2, 1.2]],
      ArrowLeft: [[-.2, 0], [.8, 1]], ArrowRight: [[.2, 0], [1.2, 1]], ArrowUp: [[0, .2], [1, 1.2]], ArrowDown: [[0, -.2], [1, .8]],
    };
    if (event.key === "0" || event.key === "Escape") reset(group);
    else if (actions[event.key] && (panel.isZoomed || "+=".includes(event.key))) zoom(panel, group, ...moved(...actions[event.key]));
    else return;
    event.preventDefault();
  });
  // The same trial in the other panel is shown larger.
  const partners = mark => group.flatMap(other => other.marks.map(entry => entry.mark))
    .filter(other => other.querySelector("title")?.textContent === mark.querySelector("title")?.textContent);
  for (const [name, isOn] of [["pointerover", true], ["pointerout", false]]) svg.addEventListener(name, event => {
    const mark = event.target.closest?.("[transform]");
    if (mark?.querySelector("title") && panel.marks.some(entry => entry.mark === mark)) for (const other of partners(mark)) other.classList.toggle("on", isOn);
  });
}

const charts = new WeakMap();

function chartViews(root) {
  return [...root.querySelectorAll(".panels")].map(chart => (charts.get(chart) ?? []).map(panel => panel.isZoomed ? panel.view : null));
}

function setUpCharts(root, views = []) {
  [...root.querySelectorAll(".panels")].forEach((chart, at) => {
    const group = [...chart.querySelectorAll("svg.panel")].map(svg => new Panel(svg));
    charts.set(chart, group);
    group.forEach((panel, number) => {
      setUpPanel(panel, group);
      const view = views[at]?.[number];
      if (view) { panel.view = view; panel.draw(); }
    });
    const hint = document.createElement("p");
    hint.className = "hint";
    hint.textContent = "Drag to zoom, double-click to reset; keys: + − 0 and arrows.";
    chart.after(hint);
  });
}
