"use strict";
/* The page of a report. Its data are one gzip file: a header in JSON, then columns of numbers. */

const COLUMNS = { u1: Uint8Array, i4: Int32Array, u4: Uint32Array, f4: Float32Array };
const HINT = "Point at an event to see what it is, which line of the plan asked for it, and what it waited for.";
const GUTTER = 150, AXIS = 22, ROW = 18, THIN = 6, GAP = 3, BAND = 20;

/* Data. */

async function decode(text) {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = await new Response(stream).arrayBuffer();
  const length = new Uint32Array(bytes, 0, 1)[0];
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  const start = 4 + length;
  return revive(head, bytes, start);
}

/* Replace {"column": [type, offset, count]} by typed arrays. */
function revive(value, bytes, start) {
  if (Array.isArray(value)) return value.map((item) => revive(item, bytes, start));
  if (value === null || typeof value !== "object") return value;
  if (value.column) {
    const [type, offset, count] = value.column;
    return new COLUMNS[type](bytes, start + offset, count);
  }
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, revive(item, bytes, start)]));
}

/* Words. */

function seconds(value) {
  const a = Math.abs(value);
  if (a >= 1) return `${value.toPrecision(4)} s`;
  return a >= 1e-3 ? `${(value * 1e3).toPrecision(4)} ms` : `${(value * 1e6).toPrecision(4)} us`;
}

function bytesText(value) {
  for (const [unit, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "KB"]]) {
    if (value >= unit) return `${(value / unit).toFixed(1)} ${name}`;
  }
  return `${value.toFixed(0)} B`;
}

function element(name, text = "", more = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  return Object.assign(made, more);
}

/* The range of time that is shown, from `t0` to `t1` seconds. Everything with a time axis listens to it. */

class View {
  constructor(end) {
    this.end = end;
    this.listeners = [];
    this.t0 = 0;
    this.t1 = end;
  }

  set(t0, t1) {
    const width = Math.min(Math.max(t1 - t0, this.end * 1e-7), this.end * 1.02);
    this.t0 = Math.min(Math.max(t0, -0.01 * this.end), 1.01 * this.end - width);
    this.t1 = this.t0 + width;
    this.changed();
  }

  zoom(factor, at) {
    this.set(at - (at - this.t0) * factor, at + (this.t1 - at) * factor);
  }

  pan(share) {
    const by = (this.t1 - this.t0) * share;
    this.set(this.t0 + by, this.t1 + by);
  }

  changed() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.listeners.forEach((draw) => draw());
    });
  }
}

/* A canvas with a gutter for names and an axis of time. */

class Chart {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
    this.context = canvas.getContext("2d");
    view.listeners.push(() => this.draw());
    new ResizeObserver(() => view.changed()).observe(canvas.parentElement);
  }

  /* Clear the canvas, as large as it is shown, and return its context. */
  begin(height) {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.parentElement.clientWidth;
    this.height = height;
    const [w, h] = [Math.round(this.width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== w || this.canvas.height !== h) {
      this.canvas.width = w;
      this.canvas.height = h;
      this.canvas.style.height = `${height}px`;
    }
    const style = getComputedStyle(document.documentElement);
    const known = {};
    this.color = (name) => (known[name] ??= style.getPropertyValue(name.startsWith("--") ? name : `--${name}`).trim());
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.fillStyle = this.color("paper");
    this.context.fillRect(0, 0, this.width, height);
    this.context.font = "11px system-ui, sans-serif";
    this.context.textBaseline = "middle";
    this.scale = (this.width - GUTTER - 12) / (this.view.t1 - this.view.t0);
    return this.context;
  }

  x(time) {
    return GUTTER + (time - this.view.t0) * this.scale;
  }

  time(x) {
    return this.view.t0 + (x - GUTTER) / this.scale;
  }

  /* Return the times of the marks of the axis: 1, 2 or 5 times a power of ten apart. */
  ticks() {
    const rough = 90 / this.scale, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough);
    const first = Math.ceil(this.view.t0 / step), count = Math.floor((this.view.t1 - this.view.t0) / step) + 1;
    return Array.from({ length: count }, (_, k) => (first + k) * step).filter((t) => t <= this.view.t1);
  }

  axis(height) {
    const c = this.context;
    for (const t of this.ticks()) {
      const x = Math.round(this.x(t)) + 0.5;
      c.fillStyle = this.color("line");
      c.fillRect(x, AXIS - 6, 1, height);
      c.fillStyle = this.color("quiet");
      c.fillText(t === 0 ? "0" : seconds(Number(t.toPrecision(12))).replace(/\.?0+ /, " "), x + 3, 9);
    }
  }

  /* Call `draw` with a clip to the area right of the gutter. */
  clipped(top, bottom, draw) {
    const c = this.context;
    c.save();
    c.beginPath();
    c.rect(GUTTER, top, this.width - GUTTER, bottom - top);
    c.clip();
    draw();
    c.restore();
  }
}

/* Rectangles of one lane. Those below a pixel are summed: a column of pixels has the colour of what fills most of it,
   and is paler where much of it is empty. The columns of a lane are drawn together, as an image of one row. */

class Painter {
  constructor(context, colors, width) {
    const row = new OffscreenCanvas(Math.max(1, Math.ceil(width)), 1).getContext("2d", { willReadFrequently: true });
    const image = row.createImageData(row.canvas.width, 1), columns = new Uint32Array(image.data.buffer);
    Object.assign(this, { context, colors, row, image, columns, pixel: NaN, sums: new Float64Array(colors.length) });
    this.codes = colors.map((color) => this.code(color));
  }

  /* Return a colour as the bytes of a pixel, whose highest is its opacity. */
  code(color) {
    this.row.fillStyle = color;
    this.row.fillRect(0, 0, 1, 1);
    return new Uint32Array(this.row.getImageData(0, 0, 1, 1).data.buffer)[0] & 0xffffff;
  }

  rect(kind, x0, x1, y, h) {
    this.context.fillStyle = this.colors[kind];
    this.context.fillRect(x0, y, Math.max(x1 - x0 - (x1 - x0 > 3 ? 0.5 : 0), 0.7), h);
  }

  part(kind, x0, width) {
    const pixel = Math.floor(x0);
    if (pixel !== this.pixel) this.closePixel(pixel);
    this.sums[kind] += width;
  }

  closePixel(next) {
    if (this.pixel >= 0) {
      let most = 0, total = 0;
      for (let k = 0; k < this.sums.length; k++) {
        total += this.sums[k];
        if (this.sums[k] > this.sums[most]) most = k;
      }
      const opacity = total > 0.75 ? 255 : total > 0.35 ? 179 : 102;
      this.columns[this.pixel] = this.codes[most] | (opacity << 24);
    }
    this.sums.fill(0);
    this.pixel = next;
  }

  /* Draw the columns of a lane, and begin those of another. */
  finish(y, h) {
    if (Number.isNaN(this.pixel)) return;
    this.closePixel(NaN);
    this.row.putImageData(this.image, 0, 0);
    this.context.drawImage(this.row.canvas, 0, y, this.row.canvas.width, h);
    this.columns.fill(0);
  }
}

/* The timeline: the lanes of all tracks (a plan as predicted, a run as measured) above each other. */

class Timeline extends Chart {
  constructor(canvas, view, plans) {
    super(canvas, view);
    this.box = canvas.parentElement;
    this.tip = document.getElementById("hover");
    this.chosen = null;
    this.lanes = [];
    this.bands = [];
    this.place(plans);
    this.listen();
    this.choose(null);
    this.box.addEventListener("scroll", () => view.changed());
  }

  /* Set the place of each lane. */
  place(plans) {
    let y = AXIS;
    for (const plan of plans) {
      for (const track of plan.tracks) {
        const isAlone = plans.length === 1 && plan.tracks.length === 1 && track.title === "predicted";
        this.bands.push({ y, text: isAlone ? "" : `${plan.title}: ${track.title}` });
        y += this.bands.at(-1).text ? BAND : 2;
        for (const lane of track.lanes) {
          y += lane.compute && lane !== track.lanes[0] ? GAP : 0;
          const h = lane.compute ? ROW : THIN;
          this.lanes.push({ ...lane, plan, track, y, h });
          y += h + 1;
        }
      }
    }
    this.total = y + 6;
    this.box.style.height = `${Math.min(this.total, Math.max(300, window.innerHeight * 0.6))}px`;
    this.spacer = element("div");
    this.box.append(this.spacer);
  }

  /* Events. */

  start(lane, k) {
    return lane.track.columns.start[k] * lane.track.tick;
  }

  stop(lane, k) {
    return (lane.track.columns.start[k] + lane.track.columns.length[k]) * lane.track.tick;
  }

  /* Return the number of the last event of a lane that starts at or before a time, or the first one of the lane. */
  last(lane, time) {
    const starts = lane.track.columns.start, ticks = time / lane.track.tick;
    let low = lane.first, high = lane.first + lane.count;
    while (low + 1 < high) {
      const middle = (low + high) >> 1;
      if (starts[middle] <= ticks) low = middle;
      else high = middle;
    }
    return low;
  }

  eventAt(x, y) {
    const lane = this.lanes.find((l) => y >= l.y - 1 && y <= l.y + l.h + 1);
    if (!lane || !lane.count || x < GUTTER) return null;
    const time = this.time(x), slack = 2 / this.scale, k = this.last(lane, time);
    if (time <= this.stop(lane, k) + slack && time >= this.start(lane, k) - slack) return { lane, k };
    const isNext = k + 1 < lane.first + lane.count && this.start(lane, k + 1) <= time + slack;
    return isNext ? { lane, k: k + 1 } : null;
  }

  find(track, k) {
    const lane = this.lanes.find((l) => l.track === track && k >= l.first && k < l.first + l.count);
    return lane ? { lane, k } : null;
  }

  /* Return what an event waited for: the communication, and of a message its start at the other end. */
  source({ lane, k }) {
    const number = lane.track.columns.source[k];
    if (number < 0) return null;
    const found = this.find(lane.track, number);
    return found && (this.source(found) || found);
  }

  detail({ lane, k }) {
    return lane.plan.details[lane.track.columns.detail[k]] || {};
  }

  label({ lane, k }) {
    const detail = this.detail({ lane, k }), m = lane.track.columns.microbatch[k];
    return detail.letter ? detail.letter + (m >= 0 ? m : "") : "";
  }

  /* Return what is known about an event, in lines; the first is its title. */
  lines(event) {
    const { lane, k } = event, columns = lane.track.columns, kind = columns.kind[k], d = this.detail(event);
    const m = columns.microbatch[k], [t0, t1] = [this.start(lane, k), this.stop(lane, k)];
    const { words, isWait } = data.kinds[kind], from = this.source(event);
    const span = `${seconds(t1 - t0)}, from ${seconds(t0)} to ${seconds(t1)}`;
    const stream = lane.compute ? "" : `, stream ${lane.stream}`;
    const facts = [d.tensor && `tensor ${d.tensor}`, d.bytes && bytesText(d.bytes), d.devices].filter(Boolean);
    return [
      isWait ? words + (d.title ? `: ${d.title}` : "") : d.title,
      [!isWait && words, m >= 0 && `microbatch ${m}`, span].filter(Boolean).join(" · "),
      lane.name + stream + (columns.critical[k] ? ", on the critical path" : ""),
      facts.join(" · "),
      d.operators,
      from && `waited for: ${this.detail(from).title} on ${from.lane.name}, ${seconds(this.stop(from.lane, from.k))}`,
      d.why && `why: ${d.why}`,
      ...(d.asked || []).map((line) => `plan: ${line}`),
    ].filter(Boolean);
  }

  /* Drawing. */

  draw() {
    const height = this.box.clientHeight, top = this.box.scrollTop, c = this.begin(height);
    this.spacer.style.height = `${Math.max(0, this.total - height)}px`;
    const painter = this.painterOf(c, `${document.documentElement.dataset.theme} ${this.width}`);
    c.imageSmoothingEnabled = false;
    const seen = this.lanes.filter((l) => l.y + l.h > top + AXIS - 4 && l.y < top + height);
    this.clipped(0, height, () => this.axis(height));
    this.clipped(AXIS, height, () => seen.forEach((lane) => this.paint(painter, lane, lane.y - top)));
    seen.filter((lane) => lane.compute).forEach((lane) => this.name(lane, lane.y - top));
    c.fillStyle = this.color("ink");
    for (const band of this.bands.filter((b) => b.text && b.y - top > AXIS - 6)) {
      c.fillText(band.text, 20, band.y - top + BAND / 2);
    }
    this.clipped(AXIS, height, () => this.mark(top));
  }

  /* Return a painter in the colours of a theme, for a width of the window. */
  painterOf(context, look) {
    if (this.look !== look) this.painter = new Painter(context, data.kinds.map((kind) => this.color(kind.color)), this.width);
    this.look = look;
    return this.painter;
  }

  name(lane, y) {
    const c = this.context;
    c.fillStyle = this.color("quiet");
    c.fillText(lane.name, 20, y + lane.h / 2, GUTTER - 26);
  }

  paint(painter, lane, y) {
    const { start, length, kind, critical } = lane.track.columns, tick = lane.track.tick;
    const path = [], labels = [], end = lane.first + lane.count;
    const each = tick * this.scale, left = this.x(0);
    for (let k = lane.count ? this.last(lane, this.view.t0) : end; k < end; k++) {
      const x0 = left + start[k] * each;
      if (x0 > this.width) break;
      const width = length[k] * each;
      if (width >= 1) {
        painter.rect(kind[k], Math.max(x0, GUTTER - 2), Math.min(x0 + width, this.width + 2), y, lane.h);
        if (width > 24 && lane.compute) labels.push([k, Math.max(x0, GUTTER), Math.min(x0 + width, this.width)]);
      } else painter.part(kind[k], x0, width);
      // What ends within a pixel of what is drawn already would not be seen.
      if (critical[k] && !(x0 + width < path.at(-2) + path.at(-1) + 0.5)) path.push(x0, Math.max(width, 1));
    }
    painter.finish(y, lane.h);
    this.paintPath(path, y + lane.h);
    labels.forEach(([k, x0, x1]) => this.paintLabel(lane, k, x0, x1, y));
  }

  paintPath(path, y) {
    this.context.fillStyle = this.color("ink");
    for (let k = 0; k < path.length; k += 2) this.context.fillRect(path[k], y - 2, path[k + 1], 2);
  }

  paintLabel(lane, k, x0, x1, y) {
    const c = this.context, kind = data.kinds[lane.track.columns.kind[k]];
    const d = this.detail({ lane, k }), short = this.label({ lane, k });
    if (kind.isWait && x1 - x0 < 80) return;
    const wide = kind.isWait ? kind.words : d.title || "";
    const text = x1 - x0 > 110 ? (short ? `${short} ` : "") + wide.replace(/^(forward|backward) of /, "") : short;
    if (!text || text.length * 4 > x1 - x0 && text === short) return;
    c.save();
    c.beginPath();
    c.rect(x0, y, x1 - x0 - 2, lane.h);
    c.clip();
    c.fillStyle = kind.isWait ? this.color("ink") : kind.isDark ? "#fff" : "#14161a";
    c.fillText(text, x0 + 4, y + lane.h / 2 + 0.5);
    c.restore();
  }

  /* Mark the chosen event, and draw an arrow from what it waited for. */
  mark(top) {
    if (!this.chosen) return;
    const c = this.context, { lane, k } = this.chosen, from = this.source(this.chosen);
    const [x0, x1] = [this.x(this.start(lane, k)), this.x(this.stop(lane, k))];
    c.strokeStyle = this.color("ink");
    c.lineWidth = 2;
    c.strokeRect(x0 - 1, lane.y - top - 1, Math.max(x1 - x0, 2) + 2, lane.h + 2);
    if (!from) return;
    const [x, y] = [this.x(this.stop(from.lane, from.k)), from.lane.y - top + from.lane.h / 2];
    c.lineWidth = 1.5;
    c.beginPath();
    c.moveTo(x, y);
    c.lineTo(x1, lane.y - top + lane.h / 2);
    c.stroke();
    c.beginPath();
    c.arc(x, y, 3, 0, 7);
    c.fillStyle = this.color("ink");
    c.fill();
  }

  /* Choice, by pointer and keys. */

  choose(event) {
    this.chosen = event;
    const box = document.getElementById("chosen");
    box.replaceChildren();
    if (event) this.write(box, event);
    else box.textContent = HINT;
    this.view.changed();
  }

  write(box, event) {
    const [title, ...rest] = this.lines(event);
    box.append(element("b", title), ...rest.map((line) => element("div", line)));
  }

  show(event) {
    this.choose(event);
    const { lane, k } = event, [t0, t1] = [this.start(lane, k), this.stop(lane, k)];
    const width = this.view.t1 - this.view.t0;
    if (t0 < this.view.t0 || t1 > this.view.t1) {
      const half = Math.max(width, (t1 - t0) * 1.1) / 2, middle = (t0 + t1) / 2;
      this.view.set(middle - half, middle + half);
    }
    const top = this.box.scrollTop;
    if (lane.y < top + AXIS || lane.y + lane.h > top + this.box.clientHeight) this.box.scrollTop = lane.y - AXIS - 20;
  }

  beside(event, by) {
    const k = event.k + by;
    return k >= event.lane.first && k < event.lane.first + event.lane.count ? { lane: event.lane, k } : event;
  }

  across(event, by) {
    const lanes = this.lanes.filter((l) => l.count), at = lanes.indexOf(event.lane) + by;
    const lane = lanes[Math.min(Math.max(at, 0), lanes.length - 1)];
    return { lane, k: this.last(lane, (this.start(event.lane, event.k) + this.stop(event.lane, event.k)) / 2) };
  }

  /* Return the next event on the critical path, in the order of time. */
  critical(event) {
    const track = event.lane.track, time = this.start(event.lane, event.k);
    let best = null;
    for (const lane of this.lanes.filter((l) => l.track === track && l.count)) {
      for (let k = this.last(lane, time); k < lane.first + lane.count; k++) {
        if (!track.columns.critical[k] || this.start(lane, k) <= time) continue;
        if (!best || this.start(lane, k) < this.start(best.lane, best.k)) best = { lane, k };
        break;
      }
    }
    return best || event;
  }

  key(e) {
    const lane = this.lanes.find((l) => l.count), event = this.chosen || (lane && { lane, k: lane.first });
    const middle = (this.view.t0 + this.view.t1) / 2;
    const nearer = () => this.view.zoom(0.7, middle), farther = () => this.view.zoom(1 / 0.7, middle);
    const moves = {
      ArrowRight: () => this.show(this.chosen ? this.beside(event, 1) : event),
      ArrowLeft: () => this.show(this.beside(event, -1)),
      ArrowDown: () => this.show(this.across(event, 1)),
      ArrowUp: () => this.show(this.across(event, -1)),
      c: () => this.show(this.critical(event)),
      g: () => this.source(event) && this.show(this.source(event)),
      Enter: () => this.near(event),
      Escape: () => this.choose(null),
      w: nearer, "+": nearer, "=": nearer, s: farther, "-": farther,
      a: () => this.view.pan(-0.2), d: () => this.view.pan(0.2),
      0: () => this.view.set(0, this.view.end),
    };
    if (!moves[e.key] || e.ctrlKey || e.metaKey || !event) return;
    e.preventDefault();
    moves[e.key]();
  }

  near(event) {
    const [t0, t1] = [this.start(event.lane, event.k), this.stop(event.lane, event.k)];
    this.view.set(t0 - (t1 - t0) * 2, t1 + (t1 - t0) * 2);
  }

  listen() {
    const at = (e) => [e.offsetX, e.offsetY + this.box.scrollTop];
    this.canvas.addEventListener("keydown", (e) => this.key(e));
    this.canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    this.canvas.addEventListener("pointerdown", (e) => {
      this.grip = { x: e.offsetX, t0: this.view.t0, t1: this.view.t1, moved: false };
      this.canvas.setPointerCapture(e.pointerId);
    });
    this.canvas.addEventListener("pointermove", (e) => (this.grip ? this.drag(e) : this.hover(e, ...at(e))));
    this.canvas.addEventListener("pointerup", (e) => {
      if (this.grip && !this.grip.moved) this.choose(this.eventAt(...at(e)));
      this.grip = null;
    });
    this.canvas.addEventListener("pointerleave", () => (this.tip.style.display = "none"));
    this.canvas.addEventListener("dblclick", (e) => {
      const event = this.eventAt(...at(e));
      if (event) this.near(event);
    });
  }

  drag(e) {
    const by = e.offsetX - this.grip.x;
    this.grip.moved ||= Math.abs(by) > 3;
    if (this.grip.moved) this.view.set(this.grip.t0 - by / this.scale, this.grip.t1 - by / this.scale);
  }

  wheel(e) {
    const isZoom = e.ctrlKey || e.metaKey || e.altKey, across = e.shiftKey ? e.deltaY || e.deltaX : e.deltaX;
    if (!isZoom && !across) return;
    e.preventDefault();
    if (isZoom) this.view.zoom(Math.exp(e.deltaY * 0.003), this.time(e.offsetX));
    else this.view.pan(across / this.width);
  }

  hover(e, x, y) {
    const event = this.eventAt(x, y);
    this.tip.style.display = event ? "block" : "none";
    if (!event) return;
    this.tip.replaceChildren();
    this.write(this.tip, event);
    const { width, height } = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(4, Math.min(e.clientX + 14, window.innerWidth - width - 8))}px`;
    this.tip.style.top = `${e.clientY + 18 + height > window.innerHeight ? e.clientY - height - 12 : e.clientY + 18}px`;
  }
}

/* The memory of the devices of a plan that run one program, under the same axis of time. */

class Memory extends Chart {
  constructor(number, view, plan) {
    super(document.getElementById(`memory${number}`), view);
    this.plan = plan;
    this.select = document.getElementById(`device${number}`);
    plan.memory.forEach((curve, k) => this.select.append(new Option(curve.name, k)));
    this.select.addEventListener("change", () => view.changed());
    this.canvas.addEventListener("pointermove", (e) => this.hover(e));
    this.canvas.addEventListener("pointerleave", () => (document.getElementById("hover").style.display = "none"));
  }

  get curve() {
    return this.plan.memory[Number(this.select.value) || 0];
  }

  /* Return the number of the point that holds at a time. */
  point(time) {
    const times = this.curve.times;
    let low = 0, high = times.length;
    while (low + 1 < high) {
      const middle = (low + high) >> 1;
      if (times[middle] <= time) low = middle;
      else high = middle;
    }
    return low;
  }

  draw() {
    const c = this.begin(150), curve = this.curve, top = curve.during.reduce((a, b) => Math.max(a, b), 0);
    this.axis(150);
    this.most = top * 1.08 || 1;
    this.clipped(AXIS, 150, () => {
      this.stack(curve);
      const capacity = this.plan.capacity - curve.overhead;
      c.fillStyle = this.color("bad");
      if (capacity > 0 && capacity < this.most) c.fillRect(GUTTER, this.y(capacity), this.width, 1.5);
    });
    c.fillStyle = this.color("quiet");
    c.fillText(bytesText(top), 20, Math.max(this.y(top), AXIS + 4));
    c.fillText(`+ ${bytesText(curve.overhead)} beside tensors`, 20, this.y(top) + 18, GUTTER - 26);
    c.fillText("0", 20, 143);
  }

  y(bytes) {
    return 150 - (150 - AXIS - 4) * bytes / this.most;
  }

  /* Draw all categories on top of each other. */
  stack(curve) {
    const count = Math.max(0, this.width - 12 - GUTTER);
    const points = Array.from({ length: count }, (_, n) => this.highest(GUTTER + n, curve));
    let below = new Float64Array(count);
    curve.values.forEach((values, n) => {
      const isLast = n + 1 === curve.values.length;
      const size = (k, at) => (isLast ? Math.max(0, curve.during[k] - below[at]) : values[k]);
      const above = below.map((bytes, at) => bytes + size(points[at], at));
      this.area(below, above, this.color(`m${n}`));
      below = above;
    });
  }

  /* Return the highest point in a column of pixels. */
  highest(x, curve) {
    let k = this.point(this.time(x));
    const last = this.point(this.time(x + 1));
    for (let j = k + 1; j <= last; j++) if (curve.during[j] > curve.during[k]) k = j;
    return k;
  }

  area(below, above, color) {
    const c = this.context;
    c.fillStyle = color;
    c.beginPath();
    for (let n = 0; n < above.length; n++) {
      c.lineTo(GUTTER + n, this.y(above[n]));
      c.lineTo(GUTTER + n + 1, this.y(above[n]));
    }
    for (let n = above.length - 1; n >= 0; n--) {
      c.lineTo(GUTTER + n + 1, this.y(below[n]));
      c.lineTo(GUTTER + n, this.y(below[n]));
    }
    c.fill();
  }

  hover(e) {
    const tip = document.getElementById("hover"), k = this.point(this.time(e.offsetX)), curve = this.curve;
    tip.style.display = e.offsetX > GUTTER ? "block" : "none";
    const parts = curve.values.map((values, n) => [data.categories[n], values[k]]).filter(([, size]) => size > 0);
    const lines = parts.map(([name, size]) => element("div", `${name} ${bytesText(size)}`));
    tip.replaceChildren(element("b", `${bytesText(curve.during[k])} at ${seconds(curve.times[k])}`), ...lines);
    tip.style.left = `${Math.min(e.clientX + 14, window.innerWidth - 240)}px`;
    tip.style.top = `${e.clientY + 18}px`;
  }
}

/* The whole page. */

let data, view, timeline;

function theme() {
  const root = document.documentElement, button = document.getElementById("theme");
  const set = (dark) => {
    root.dataset.theme = dark ? "dark" : "light";
    if (view) view.changed();
  };
  const wanted = window.matchMedia("(prefers-color-scheme: dark)");
  set(wanted.matches);
  wanted.addEventListener("change", () => set(wanted.matches));
  button.addEventListener("click", () => set(root.dataset.theme !== "dark"));
}

async function main() {
  theme();
  data = await decode(document.getElementById("data").textContent);
  view = new View(Math.max(...data.plans.flatMap((plan) => plan.tracks.map((track) => track.seconds))));
  timeline = new Timeline(document.getElementById("timeline"), view, data.plans);
  document.getElementById("all").addEventListener("click", () => view.set(0, view.end));
  document.getElementById("in").addEventListener("click", () => view.zoom(0.5, (view.t0 + view.t1) / 2));
  document.getElementById("out").addEventListener("click", () => view.zoom(2, (view.t0 + view.t1) / 2));
  const memories = data.plans.map((plan, number) => new Memory(number, view, plan));
  window.report = { data, view, timeline, memories };
  view.changed();
  const ready = () => (document.body.dataset.ready = performance.now().toFixed(0));
  requestAnimationFrame(() => requestAnimationFrame(ready));
}

main();
