// Charts, filters and all interaction. The numbers come from #data (`payload` in page.py), in the units shown.
"use strict";
(() => {
  const D = JSON.parse(document.getElementById("data").textContent);
  const $ = (query, root = document) => root.querySelector(query);
  const $$ = (query, root = document) => [...root.querySelectorAll(query)];
  const make = (space) => (tag, attributes = {}, ...children) => {
    const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  };
  const h = make(null), s = make("http://www.w3.org/2000/svg");

  // State of the page

  const metricOf = Object.fromEntries(D.metrics.map((m) => [m.name, m]));
  const has = (name, task) => D.cells.some((c) => c.task === task && c.values[name]);
  const quality = () => D.metrics.filter((m) => m.kind !== "cost" && has(m.name, state.task));
  const state = { task: D.tasks[0], models: new Set(D.models), lengths: new Set(D.lengths), seeds: false, logY: true };
  const choose = { overview: null, quality: null, length: null, curve: null };
  const visible = () => D.cells.filter((c) => c.task === state.task && state.models.has(c.model) && (c.length === null || state.lengths.has(c.length)));
  const color = (cell) => `var(--c${D.models.indexOf(cell.model) % 8})`;
  const shapeOf = (cell) => D.models.indexOf(cell.model) % 8;
  const dashOf = (cell) => {
    const variants = [...new Set(D.cells.filter((c) => c.task === cell.task && c.model === cell.model).map((c) => c.series))];
    return ["", "7 4", "2 4", "9 3 2 3"][variants.indexOf(cell.series) % 4];
  };

  // Numbers as text, by the same rules as tables.number

  const group = (n) => Math.round(n).toString().replace(/\B(?=(\d{3})+$)/g, ",");
  function text(value, metric) {
    if (value === null || value === undefined) return "–";
    if (metric && metric.unit === "%") return value.toFixed(1);
    if (metric && metric.name === "tokens_per_second" && value >= 1e4) return value >= 1e6 ? `${(value / 1e6).toFixed(2)}M` : `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)}k`;
    if (Math.abs(value) >= 1000 || (metric && ["state_bytes", "params"].includes(metric.name))) return group(value);
    if (value === 0) return "0";
    const size = Math.abs(value);
    return size < 0.001 ? value.toPrecision(2) : value.toFixed(size < 10 ? 3 : size < 100 ? 1 : 0);
  }
  function brief(value, digits = 3) {  // on an axis
    const size = Math.abs(value), plain = (n) => String(Number(n.toPrecision(digits)));
    if (size >= 1e9) return plain(value / 1e9) + "G";
    if (size >= 1e6) return plain(value / 1e6) + "M";
    if (size >= 1e4) return plain(value / 1e3) + "k";
    return size >= 1e-3 || size === 0 ? plain(value) : value.toExponential(0);
  }
  function distinct(values) {  // with as many digits as make the labels distinct
    for (let digits = 3; digits < 8; digits++) {
      const labels = values.map((v) => brief(v, digits));
      if (new Set(labels).size === values.length || digits === 7) return labels;
    }
  }
  const unitOf = (m) => (m.unit ? ` ${m.unit}` : "");
  const arrow = (m) => ({ higher: " ↑", lower: " ↓", neither: "" })[m.better];
  function tipLines(cell, metric) {
    const [mid, low, high, values] = cell.values[metric.name];
    const finite = values.filter((v) => v !== null).length;
    return [
      `${metric.label} ${text(mid, metric)}${unitOf(metric)}`,
      low === null || low === high ? null : `95 % interval ${text(low, metric)} to ${text(high, metric)}`,
      `${finite} of ${values.length} seed${values.length === 1 ? "" : "s"}${finite < values.length ? ` finite: ${cell.status}` : ""}`,
      cell.lr === null ? null : `lr ${cell.lr}`,
    ];
  }

  // Scales

  function scale(kind, [a, b], [from, to]) {
    const f = kind === "log" ? Math.log : (v) => v;
    const [p, q] = [f(a), f(b)];
    const of = (v) => from + ((f(v) - p) / (q - p || 1)) * (to - from);
    return Object.assign(of, { kind, domain: [a, b] });
  }
  function domain(values, kind, pad = 0.06) {
    const good = values.filter((v) => v !== null && Number.isFinite(v) && (kind !== "log" || v > 0));
    if (!good.length) return null;
    let [a, b] = [Math.min(...good), Math.max(...good)];
    if (kind === "log") {
      const grow = a === b ? 1.6 : (b / a) ** pad;
      return [a / grow, b * grow];
    }
    const grow = a === b ? Math.abs(a) * 0.2 || 1 : (b - a) * pad;
    return [a - grow, b + grow];
  }
  function ticks({ kind, domain: [a, b] }, count) {
    const out = [];
    if (kind === "log") {
      for (const steps of [[1, 2, 5], [1, 3], [1]]) {
        out.length = 0;
        for (let e = Math.floor(Math.log10(a)); e <= Math.ceil(Math.log10(b)); e++)
          for (const m of steps) if (m * 10 ** e >= a * 0.999 && m * 10 ** e <= b * 1.001) out.push(m * 10 ** e);
        if (out.length <= count) break;
      }
      const every = Math.ceil(out.length / count);
      if (out.length >= 2) return out.filter((_, i) => i % every === 0);
      out.length = 0;
    }
    const raw = (b - a) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((v) => v >= raw);
    for (let v = Math.ceil(a / step) * step; v <= b + step * 1e-9; v += step) out.push(Number(v.toPrecision(12)));
    return out;
  }

  // Marks

  function mark(shape, x, y, r, attributes) {
    if (shape === 0) return s("circle", { cx: x, cy: y, r, ...attributes });
    const point = (angle, size) => `${(x + Math.sin(angle) * size).toFixed(1)},${(y - Math.cos(angle) * size).toFixed(1)}`;
    const ring = (n, turn, size, inner) => Array.from({ length: n }, (_, i) => point(turn + (i * 2 * Math.PI) / n, inner && i % 2 ? inner : size)).join(" ");
    const points = [null, ring(4, Math.PI / 4, r * 1.25), ring(3, 0, r * 1.35), ring(4, 0, r * 1.35), ring(3, Math.PI, r * 1.35),
      ring(6, 0, r * 1.2), ring(10, 0, r * 1.5, r * 0.65), ring(5, 0, r * 1.25)][shape];
    return s("polygon", { points, ...attributes });
  }
  const swatch = (cell, dash) =>
    s("svg", { width: 16, height: 12, "aria-hidden": "true" }, s("line", { x1: 0, x2: 16, y1: 6, y2: 6, stroke: color(cell), "stroke-width": 2, "stroke-dasharray": dash }), mark(shapeOf(cell), 8, 6, 3.6, { fill: color(cell) }));

  // The tooltip

  const tip = $("#tip");
  function showTip(x, y, title, lines) {
    tip.replaceChildren(h("b", {}, title), ...lines.filter(Boolean).map((line) => h("span", {}, line)));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${y - height - 12 < 8 ? y + 18 : y - height - 12}px`;
  }
  const hideTip = () => { tip.hidden = true; };
  addEventListener("scroll", hideTip, { passive: true });
  addEventListener("pointerdown", ({ target }) => { if (!target.closest("figure svg")) hideTip(); });

  // One chart.
  // lines: [{cell, points: [{x, y, low, high, seeds, title, tip}], band, marks, joined}]; fails: [{cell, x, tip}];
  // refs: [{points, label}]; steps: a Pareto front; x and y: {kind, label, values of ticks, fixed domain}

  function chart(host, spec) {
    const width = host.clientWidth;
    if (!width) return;
    const height = spec.height, big = width > 560 && spec.names;
    const all = spec.lines.flatMap((line) => line.points);
    const fails = spec.fails || [];
    const yValues = all.flatMap((p) => [p.y, p.low, p.high, ...(state.seeds && p.seeds ? p.seeds : [])]);
    const xDomain = spec.x.domain || domain([...all.map((p) => p.x), ...fails.map((f) => f.x)], spec.x.kind, 0.04);
    const yDomain = spec.y.domain || domain(yValues, spec.y.kind);
    if (!xDomain || !(yDomain || fails.length)) return host.replaceChildren(h("p", { class: "empty" }, "There are no results with these filters."));
    const left = 46, right = big ? 118 : 14, top = 10, strip = fails.length ? 20 : 0, bottom = 36 + strip;
    const x = scale(spec.x.kind, xDomain, [left + 8, width - right - 8]);
    const y = scale(spec.y.kind, yDomain || [0, 1], [height - bottom, top]);
    const svg = s("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.title });
    const floor = height - bottom;
    const yTicks = ticks(y, Math.max(3, Math.round((floor - top) / 44))).filter((v) => y(v) >= top - 4), yLabels = distinct(yTicks);
    yTicks.forEach((v, i) => {
      svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }), s("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, yLabels[i]));
    });
    svg.append(s("line", { class: "axis", x1: left, x2: width - right, y1: floor, y2: floor }));
    let last = -Infinity;
    const xTicks = spec.x.ticks || ticks(x, Math.max(3, Math.round((width - left - right) / 90))), xLabels = spec.x.whole ? xTicks.map(String) : distinct(xTicks);
    for (const [i, v] of xTicks.entries()) {
      const label = xLabels[i];
      svg.append(s("line", { class: "axis", x1: x(v), x2: x(v), y1: floor, y2: floor + 4 }));
      if (x(v) - last < label.length * 7 + 8) continue;
      last = x(v);
      svg.append(s("text", { x: x(v), y: floor + strip + 17, "text-anchor": "middle" }, label));
    }
    svg.append(s("text", { x: width - right, y: height - 3, "text-anchor": "end" }, spec.x.label));
    for (const ref of spec.refs || []) {
      const path = ref.points.map((p) => [p.x, Math.max(p.y, y.domain[0])]);
      if (path.length === 1) path.push([xDomain[1], path[0][1]]), path.unshift([xDomain[0], path[0][1]]);
      svg.append(s("path", { class: "ref", d: "M" + path.map(([px, py]) => `${x(px).toFixed(1)} ${y(py).toFixed(1)}`).join("L") }));
      svg.append(s("text", { x: left + 2, y: y(path[0][1]) - 5, "font-size": 10.5 }, ref.label));
    }
    if (spec.steps && spec.steps.length > 1)
      svg.append(s("path", { class: "frontier", d: spec.steps.map((p, i) => (i ? `H${x(p.x).toFixed(1)}V${y(p.y).toFixed(1)}` : `M${x(p.x).toFixed(1)} ${y(p.y).toFixed(1)}`)).join("") }));

    const targets = [], names = [];
    for (const line of spec.lines) {
      const paint = color(line.cell), node = s("g", { class: "series", "data-series": line.cell.series });
      const at = line.points.filter((p) => p.y !== null && (y.kind !== "log" || p.y > 0));
      const to = (p, v) => `${x(p.x).toFixed(1)} ${y(v).toFixed(1)}`;
      if (line.band && at.some((p) => p.low !== null)) {
        const edge = [...at.map((p) => to(p, p.high ?? p.y)), ...at.toReversed().map((p) => to(p, p.low ?? p.y))];
        node.append(s("path", { d: `M${edge.join("L")}Z`, fill: paint, "fill-opacity": 0.16 }));
      }
      if (line.joined !== false && at.length > 1)
        node.append(s("path", { class: "line", d: "M" + at.map((p) => to(p, p.y)).join("L"), stroke: paint, "stroke-dasharray": dashOf(line.cell), ...(line.band ? { "stroke-width": 1.7 } : {}) }));
      for (const p of at) {
        if (line.marks) {
          if (p.low !== null && p.low !== undefined && y(p.low) - y(p.high) > 3)
            node.append(s("line", { x1: x(p.x), x2: x(p.x), y1: y(Math.max(p.low, y.kind === "log" ? y.domain[0] : p.low)), y2: y(p.high), stroke: paint, "stroke-width": 1.6, "stroke-opacity": 0.75 }));
          if (state.seeds)
            for (const v of (p.seeds || []).filter((v) => v !== null)) node.append(s("circle", { class: "seed", cx: x(p.x) + 8, cy: y(v), r: 2, fill: paint, "fill-opacity": 0.7 }));
          if (p.ring) node.append(s("circle", { cx: x(p.x), cy: y(p.y), r: 8, fill: "none", stroke: paint }));
          node.append(mark(shapeOf(line.cell), x(p.x), y(p.y), 4.6, { class: "mark", fill: paint }));
        }
        targets.push({ px: x(p.x), py: y(p.y), node, title: p.title, tip: p.tip });
      }
      if (at.length) names.push({ y: y(at.at(-1).y), end: x(at.at(-1).x), at: y(at.at(-1).y), x: x(at.at(-1).x), name: line.cell.series, paint, node });
      svg.append(node);
    }
    if (big && spec.names === "end") {  // at the ends of the lines, pushed apart
      names.sort((a, b) => a.y - b.y);
      const gap = 15;
      names.forEach((n, i) => { n.y = Math.max(n.y, i ? names[i - 1].y + gap : top + 4); });
      for (let i = names.length - 1, limit = floor - 2; i >= 0; i--) names[i].y = limit = Math.min(names[i].y, limit), limit -= gap;
      for (const n of names) n.node.append(s("text", { class: "name", x: width - right + 4, y: n.y + 4, style: `fill:${n.paint}` }, n.name));
    }
    if (spec.names === "beside") {  // each at the first free place around its mark
      const taken = names.map((n) => [n.x - 6, n.at - 6, n.x + 6, n.at + 6]);
      for (const n of names) {
        const w = n.name.length * 7 + 4;
        const places = [-8, 16, -22, 30, -36, 44, -50].flatMap((dy) => [[9, dy, "start"], [-9, dy, "end"]]);
        const box = ([dx, dy, anchor]) => [n.x + dx - (anchor === "end" ? w : 0), n.at + dy - 11, n.x + dx + (anchor === "end" ? 0 : w), n.at + dy + 2];
        const free = (b) => b[0] > left - 40 && b[2] < width && b[1] > -2 && b[3] < floor && !taken.some((t) => b[0] < t[2] && b[2] > t[0] && b[1] < t[3] && b[3] > t[1]);
        const place = places.find((p) => free(box(p))) || places[0];
        taken.push(box(place));
        n.node.append(s("text", { class: "name", x: n.x + place[0], y: n.at + place[1], "text-anchor": place[2], style: `fill:${n.paint}` }, n.name));
      }
    }
    if (fails.length) {
      svg.append(s("text", { x: left - 8, y: floor + 18, "text-anchor": "end", "font-size": 10 }, "none"));
      const at = new Map();
      for (const f of fails) at.set(f.x, [...(at.get(f.x) || []), f]);
      for (const [position, here] of at) here.forEach((f, i) => {
        const cx = x(position) + (i - (here.length - 1) / 2) * 12, cy = floor + 14, node = s("g", { class: "series fail", "data-series": f.cell.series });
        node.append(s("path", { d: `M${cx - 3.6} ${cy - 3.6}l7.2 7.2m0 -7.2l-7.2 7.2`, stroke: color(f.cell), "stroke-width": 2.2, fill: "none" }));
        svg.append(node);
        targets.push({ px: cx, py: cy, node, title: f.title, tip: f.tip });
      });
    }
    const focus = s("circle", { r: 8, fill: "none", "stroke-width": 1.4, stroke: "currentColor", visibility: "hidden" });
    svg.append(focus);
    function move(event) {
      const box = svg.getBoundingClientRect(), mx = event.clientX - box.left, my = event.clientY - box.top;
      let best = null, least = 60 ** 2;
      for (const t of targets) {
        const far = (t.px - mx) ** 2 + (t.py - my) ** 2;
        if (far < least) [best, least] = [t, far];
      }
      $$(".on", svg).forEach((node) => node.classList.remove("on"));
      svg.classList.toggle("hover", best !== null);
      focus.setAttribute("visibility", best ? "visible" : "hidden");
      if (!best) return hideTip();
      best.node.classList.add("on");
      focus.setAttribute("cx", best.px), focus.setAttribute("cy", best.py);
      showTip(box.left + best.px, box.top + best.py, best.title, best.tip);
    }
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", ({ pointerType }) => {
      if (pointerType === "touch") return;  // after a tap the tooltip stays until the next touch
      svg.classList.remove("hover"), focus.setAttribute("visibility", "hidden"), hideTip();
    });
    host.replaceChildren(svg);
  }

  const drawings = new Map();  // host -> its spec, to redraw at another width
  const watcher = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    const known = drawings.get(target);
    if (known && known.width !== target.clientWidth) known.width = target.clientWidth, chart(target, known.spec);
  }));
  function figure(list, title, unit, spec, wide = false) {
    const host = h("div");
    list.append(h("figure", { class: wide ? "wide" : null }, h("figcaption", {}, title, " ", h("small", {}, unit)), host));
    drawings.set(host, { spec: { title, ...spec }, width: host.clientWidth });
    chart(host, { title, ...spec });
    watcher.observe(host);
  }
  function afresh(list) {
    for (const host of drawings.keys()) if (list.contains(host)) watcher.unobserve(host), drawings.delete(host);
    list.replaceChildren();
  }

  // Sections

  const bySeries = (cells) => {
    const out = new Map();
    for (const c of cells) out.set(c.series, [...(out.get(c.series) || []), c]);
    return [...out.values()].map((group) => group.sort((a, b) => a.length - b.length));
  };
  // the names of the lines, for screens that are too narrow to write them at the ends of the lines
  const legend = (cells) => h("p", { class: "legend" }, ...bySeries(cells).map(([c]) => h("span", {}, swatch(c, dashOf(c)), c.series)));
  const point = (c, m, at) => {
    const [y, low, high, seeds] = c.values[m.name];
    return { x: at, y, low, high, seeds, title: c.length === null ? c.series : `${c.series}, L = ${c.length}`, tip: tipLines(c, m) };
  };
  function pick(options, current, label, onpick) {  // up to five options as buttons, more as a list
    if (options.length < 2) return [];
    if (options.length <= 5) return [label && h("span", {}, label), ...options.map(([value, name]) => h("button", { "aria-pressed": String(value === current), onclick: () => onpick(value) }, name))];
    return [label && h("span", {}, label), h("select", { "aria-label": label || "Metric shown", onchange: (e) => onpick(options[e.target.selectedIndex][0]) }, ...options.map(([value, name]) => h("option", { selected: value === current ? "" : null }, name)))];
  }

  function overview() {
    const cells = visible(), shown = D.metrics.filter((m) => has(m.name, state.task));
    if (!shown.length && !cells.length) return;
    if (!shown.some((m) => m.name === choose.overview)) choose.overview = shown.length ? shown[0].name : null;
    const m = metricOf[choose.overview];
    $("#overview .tools").replaceChildren(
      h("select", { "aria-label": "Metric shown", onchange: (e) => { choose.overview = shown[e.target.selectedIndex].name; overview(); } },
        ...shown.map((option) => h("option", { selected: option === m ? "" : null }, option.label + (option.unit ? `, ${option.unit}` : "")))));
    const lengths = [...new Set(cells.map((c) => c.length))].sort((a, b) => a - b);
    const mids = cells.map((c) => m && c.values[m.name] && c.values[m.name][0]).filter((v) => v !== undefined && v !== null);
    const range = m && (m.unit === "%" ? [0, 100] : domain(mids, m.log ? "log" : "linear", 0));
    const warmth = range && scale(m.log ? "log" : "linear", range, m.better === "lower" ? [46, 3] : [3, 46]);
    const rows = bySeries(cells).map((group) => h("tr", {}, h("th", { scope: "row" }, h("i", { class: "swatch", "data-model": D.models.indexOf(group[0].model) }), group[0].series),
      ...lengths.map((length) => {
        const c = group.find((one) => one.length === length);
        if (!c) return h("td", { class: "blank" });
        const value = m && c.values[m.name];
        if (!value) return h("td", c.complete ? { class: "blank" } : { class: "no" }, c.complete ? "–" : c.status);
        const [mid, low, high, seeds] = value, finite = seeds.filter((v) => v !== null).length;
        const between = low !== null && text(low, m) !== text(high, m) ? h("small", {}, `[${text(low, m)}, ${text(high, m)}]`) : null;
        return h("td", { style: `--heat:${warmth(mid).toFixed(0)}%` }, text(mid, m) + (c.mixed ? "‡" : ""), between, finite < seeds.length ? h("small", { class: "part" }, `${finite} of ${seeds.length} finite`) : null);
      })));
    $("#matrix").replaceChildren(rows.length ? h("table", { class: "matrix" }, h("thead", {}, h("tr", {}, h("th"), ...lengths.map((n) => h("th", { scope: "col" }, n === null ? "" : `L = ${n}`)))), h("tbody", {}, ...rows)) : h("p", { class: "empty" }, "There are no results with these filters."));
  }

  function againstLength() {
    const section = $("#against-length"), list = $(".charts", section), cells = visible().filter((c) => c.length !== null);
    afresh(list);
    const options = quality();
    if (!options.some((m) => m.name === choose.quality)) choose.quality = options.length ? options[0].name : null;
    $(".tools", section).replaceChildren(
      ...pick(options.map((m) => [m.name, m.label.replace(/ \(.*/, "")]), choose.quality, "", (v) => { choose.quality = v; draw(); }),
      h("button", { "aria-pressed": String(state.seeds), onclick: () => { state.seeds = !state.seeds; draw(); } }, "each seed"),
      h("button", { "aria-pressed": String(state.logY), onclick: () => { state.logY = !state.logY; draw(); } }, "logarithmic costs"));
    const names = [choose.quality, "tokens_per_second", "step_ms", "peak_memory", "state_bytes"].filter((n) => n && has(n, state.task));
    const lengths = [...new Set(cells.map((c) => c.length))].sort((a, b) => a - b);
    const xDomain = domain(lengths, "log", 0.02);
    list.append(legend(cells));
    for (const name of names) {
      const m = metricOf[name], first = name === choose.quality;
      const lines = bySeries(cells).map((group) => ({ cell: group[0], marks: true, points: group.filter((c) => c.values[name]).map((c) => point(c, m, c.length)) }));
      const fails = cells.filter((c) => !c.complete).map((c) => ({ cell: c, x: c.length, title: `${c.series}, L = ${c.length}`, tip: [`no result: ${c.status}`] }));
      const chance = (D.chance[state.task] || {})[name], unit = m.unit + arrow(m);
      const refs = chance && lengths.length ? [{ label: "chance", points: lengths.filter((n) => chance[n] !== undefined).map((n) => ({ x: n, y: chance[n] })) }].filter((r) => r.points.length) : [];
      figure(list, m.label, unit + (m.log && state.logY ? ", log scale" : ""), {
        lines, fails, refs, height: first ? 330 : 250, names: first ? "end" : null,
        x: { kind: "log", label: "sequence length, tokens (log₂)", ticks: lengths, whole: true, domain: xDomain },
        y: { kind: m.log && state.logY ? "log" : "linear", domain: m.unit === "%" ? [0, 103] : null },
      }, first);
    }
  }

  function tradeOffs() {
    const section = $("#trade-offs"), list = $(".charts", section), m = metricOf[choose.quality];
    afresh(list);
    const cells = visible().filter((c) => m && c.values[m.name]);
    const lengths = [...new Set(cells.map((c) => c.length))].sort((a, b) => a - b);
    if (!lengths.includes(choose.length)) {
      const wide = lengths.filter((n) => new Set(cells.filter((c) => c.length === n).map((c) => c.series)).size > 1);
      choose.length = (wide.length ? wide : lengths).at(-1);
    }
    $(".tools", section).replaceChildren(...pick(lengths.map((n) => [n, String(n)]), choose.length, "at length", (v) => { choose.length = v; tradeOffs(); }));
    const at = cells.filter((c) => c.length === choose.length);
    for (const name of ["state_bytes", "step_ms", "peak_memory"].filter((n) => at.some((c) => c.values[n]))) {
      const cost = metricOf[name], here = at.filter((c) => c.values[name]), up = m.better === "higher";
      const lines = here.map((c) => ({ cell: c, marks: true, joined: false, points: [{ ...point(c, m, c.values[name][0]), tip: [...tipLines(c, m).slice(0, 2), ...tipLines(c, cost).slice(0, 1), tipLines(c, m)[2]] }] }));
      const order = here.map((c) => ({ x: c.values[name][0], y: c.values[m.name][0] })).sort((a, b) => a.x - b.x || (up ? b.y - a.y : a.y - b.y));
      const steps = [];
      for (const p of order) if (!steps.length || (up ? p.y > steps.at(-1).y : p.y < steps.at(-1).y)) steps.push(p);
      figure(list, `Against ${cost.label.toLowerCase()}`, `${m.label.toLowerCase()}, ${m.unit}${arrow(m)}`, {
        lines, steps, height: 250, names: "beside",
        x: { kind: "log", label: `${cost.label.toLowerCase()}, ${cost.unit} (log) ${cost.better === "lower" ? "← better" : "better →"}`, domain: domain(here.map((c) => c.values[name][0]), "log", 0.12) },
        y: { kind: "linear", domain: m.unit === "%" ? [0, 108] : null },
      });
    }
    if (!list.children.length) list.append(h("p", { class: "empty" }, "There are no results with these filters."));
  }

  const curveNames = { "val/token_accuracy": ["Token accuracy (validation)", "%"], "val/sequence_accuracy": ["Sequence accuracy (validation)", "%"], "val/loss": ["Loss (validation)", "nats per token"], "val/bits_per_byte": ["Bits per byte (validation)", "bits"], "train/loss": ["Loss (training)", "nats per token"] };
  function curves() {
    const section = $("#curves"), list = $(".charts", section), cells = visible();
    afresh(list);
    const mine = D.curves.filter((k) => cells.includes(D.cells[k.cell]));
    const options = Object.keys(curveNames).filter((n) => mine.some((k) => k.name === n));
    if (!options.includes(choose.curve)) choose.curve = options[0];
    $(".tools", section).replaceChildren(...pick(options.map((n) => [n, curveNames[n][0]]), choose.curve, "", (v) => { choose.curve = v; curves(); }));
    const shown = mine.filter((k) => k.name === choose.curve);
    if (!shown.length) return list.append(h("p", { class: "empty" }, "There are no curves with these filters."));
    const [label, unit] = curveNames[choose.curve], percent = unit === "%";
    list.append(legend(cells));
    const lowest = percent ? null : domain(shown.flatMap((k) => k.mid), "log");
    for (const length of [...new Set(shown.map((k) => D.cells[k.cell].length))].sort((a, b) => a - b)) {
      const here = shown.filter((k) => D.cells[k.cell].length === length);
      const lines = here.map((k) => {
        const cell = D.cells[k.cell];
        return { cell, band: true, points: k.x.map((step, i) => ({ x: step, y: k.mid[i], low: k.low ? k.low[i] : null, high: k.high ? k.high[i] : null, title: cell.series, tip: [`step ${group(step)}`, `${text(k.mid[i])} ${unit}`, k.n ? `${k.n[i]} of ${k.of} seeds, ${text(k.low[i])} to ${text(k.high[i])}` : null] })) };
      });
      const kind = !percent && lowest && lowest[1] / lowest[0] > 8 ? "log" : "linear";
      figure(list, length === null ? label : `L = ${length}`, unit + (kind === "log" ? ", log scale" : ""), { lines, height: 220, x: { kind: "linear", label: "optimizer step" }, y: { kind, domain: percent ? [0, 103] : lowest } });
    }
  }

  function rates() {
    const section = $("#rates"), list = $(".charts", section), cells = visible();
    afresh(list);
    const mine = D.rates.filter((r) => cells.includes(D.cells[r.cell]));
    section.hidden = !mine.length;
    for (const length of [...new Set(mine.map((r) => D.cells[r.cell].length))].sort((a, b) => a - b)) {
      const lines = mine.filter((r) => D.cells[r.cell].length === length).map((r) => {
        const cell = D.cells[r.cell];
        return { cell, marks: true, points: r.points.filter((p) => p[1] !== null).map(([lr, y, low, high, finite, of]) => ({ x: lr, y, low, high, ring: lr === cell.lr, title: `${cell.series}, lr ${lr}`, tip: [`best validation loss ${text(y)}`, `${finite} of ${of} seeds finite`] })) };
      });
      figure(list, length === null ? "Best validation loss" : `L = ${length}`, "nats per token ↓", { lines, height: 220, x: { kind: "log", label: "learning rate (log)" }, y: { kind: "log" } });
    }
  }

  function tables() {
    for (const row of $$("[data-task], [data-length], tr[data-model]").filter((n) => n.tagName === "TR")) {
      const { task, model, length } = row.dataset;
      const off = (task && task !== state.task) || (model && !state.models.has(model)) || (length && length !== "None" && !state.lengths.has(Number(length)));
      row.hidden = Boolean(off);
      const next = row.nextElementSibling;
      if (next && next.classList.contains("more")) next.hidden = off || $(".open", row).getAttribute("aria-expanded") !== "true";
    }
  }

  function countFailures() {
    const rows = $$("#failures tbody tr"), shown = rows.filter((row) => !row.hidden).length;
    if (!rows.length) return;
    $("#failures").hidden = !shown;
    $("#failures").parentElement.previousElementSibling.hidden = shown > 0;
    $("#failures-count").textContent = shown === rows.length ? "" : `${shown} of ${rows.length} shown`;
  }

  // Filters

  function filters() {
    const toggle = (set, value, all) => {
      if (set.has(value)) set.delete(value); else set.add(value);
      if (!set.size) all.forEach((v) => set.add(v));  // switching the last one off switches all on
      draw();
    };
    const first = (model) => D.cells.find((c) => c.model === model);
    const groups = [];
    if (D.tasks.length > 1) groups.push(h("div", { class: "group one" }, h("span", {}, "Task"), ...D.tasks.map((t) => h("button", { "aria-pressed": String(t === state.task), onclick: () => { state.task = t; draw(); } }, t))));
    groups.push(h("div", { class: "group" }, h("span", {}, "Model"), ...D.models.map((m) => h("button", { "data-filter-model": m, "aria-pressed": String(state.models.has(m)), onclick: () => toggle(state.models, m, D.models) }, swatch(first(m), ""), m))));
    if (D.lengths.length > 1) groups.push(h("div", { class: "group" }, h("span", {}, "Length"), ...D.lengths.map((n) => h("button", { "data-filter-length": n, "aria-pressed": String(state.lengths.has(n)), onclick: () => toggle(state.lengths, n, D.lengths) }, String(n)))));
    const nav = $("#filters"), focused = document.activeElement && nav.contains(document.activeElement) ? $$("button", nav).indexOf(document.activeElement) : -1, scrolled = nav.scrollLeft;
    nav.replaceChildren(...groups);
    nav.scrollLeft = scrolled;
    if (focused >= 0) $$("button", nav)[focused].focus();
  }

  function draw() {
    hideTip();
    filters();
    const lengths = new Set(D.cells.map((c) => c.length));
    for (const [id, part] of [["overview", overview], ["against-length", againstLength], ["trade-offs", tradeOffs], ["curves", curves], ["rates", rates]]) {
      $(`#${id}`).hidden = (id === "curves" && !D.curves.length) || (id === "against-length" && lengths.size === 1 && lengths.has(null));
      part();
    }
    tables();
    countFailures();
  }

  // Table: sort, details, copy

  const table = $("#cells");
  $$("thead th button", table).forEach((button, column) => button.addEventListener("click", () => {
    const head = button.parentElement, up = head.getAttribute("aria-sort") !== "ascending";
    $$("th[aria-sort]", table).forEach((th) => th.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = $("tbody", table), pairs = $$("tr.cell", body).map((row) => [row, row.nextElementSibling]);
    const key = ([row]) => row.children[column].dataset.v;
    const numbers = pairs.every((p) => key(p) === "" || !Number.isNaN(Number(key(p))));
    pairs.sort((a, b) => {
      const [p, q] = [key(a), key(b)];
      if (p === "" || q === "") return (p === "") - (q === "");  // rows without a number come last in both orders
      return (up ? 1 : -1) * (numbers ? Number(p) - Number(q) : p.localeCompare(q));
    });
    body.append(...pairs.flat());
  }));
  document.addEventListener("click", async ({ target }) => {
    if (target.matches(".open")) {
      const open = target.getAttribute("aria-expanded") !== "true";
      target.setAttribute("aria-expanded", String(open));
      target.closest("tr").nextElementSibling.hidden = !open;
    } else if (target.matches(".copy button")) {
      const line = $("code", target.parentElement);
      try {
        await navigator.clipboard.writeText(line.textContent);
        target.textContent = "copied";
      } catch {  // no permission: select it, to be copied by keyboard
        getSelection().selectAllChildren(line);
        target.textContent = "selected";
      }
      setTimeout(() => { target.textContent = "copy"; }, 1500);
    }
  });

  // Light and dark

  const root = document.documentElement, keep = "seqmix-report-theme";
  const remembered = () => { try { return localStorage.getItem(keep); } catch { return null; } };
  const dark = () => root.dataset.theme === "dark" || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  if (remembered()) root.dataset.theme = remembered();
  $("#theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem(keep, root.dataset.theme); } catch { /* without storage the choice is not remembered */ }
  });

  $$("#filters, #overview, #against-length, #trade-offs, #curves, #rates").forEach((node) => { node.hidden = false; });
  draw();
})();
