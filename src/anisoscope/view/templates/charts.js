/* Figures: colours by role, numbers looked up, traces completed, drawn by plotly. */
(function (page) {
  "use strict";
  const root = document.documentElement;
  let specs = {}, arrays = {};
  const drawn = new Set(), hidden = new Set();
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const painted = new Set(["color", "fillcolor", "gridcolor", "linecolor", "tickcolor", "zerolinecolor", "bgcolor", "bordercolor"]);

  /* Colours: specs name roles, the style sheet says what they are. */
  function property(name) { return getComputedStyle(root).getPropertyValue("--" + name).trim(); }
  function stops(name) { return property(name).split(",").map(function (s) { return s.trim(); }); }
  function channels(hex) {
    const full = hex.length === 4 ? hex.replace(/[0-9a-f]/gi, "$&$&") : hex;
    return [1, 3, 5].map(function (i) { return parseInt(full.slice(i, i + 2), 16); });
  }
  function between(list, t) {
    const at = Math.min(Math.max(t, 0), 1) * (list.length - 1), left = Math.min(Math.floor(at), list.length - 2);
    const a = channels(list[left]), b = channels(list[left + 1]);
    return "rgb(" + a.map(function (v, i) { return Math.round(v + (b[i] - v) * (at - left)); }).join(",") + ")";
  }
  function colour(token) {
    if (typeof token !== "string" || token[0] !== "@") return token;
    const parts = token.slice(1).split("/");
    if (token.startsWith("@seq:")) {
      const solid = between(stops("seq"), parseFloat(parts[0].slice(4)));
      return parts.length > 1 ? solid.replace("rgb(", "rgba(").replace(")", "," + parts[1] + ")") : solid;
    }
    const hex = property(parts[0]);
    return parts.length > 1 ? "rgba(" + channels(hex).join(",") + "," + parts[1] + ")" : hex;
  }
  function paint(value, key) {
    if (key === "colorscale" && (value === "@heat" || value === "@seq")) {
      const list = stops(value.slice(1));
      return list.map(function (c, i) { return [i / (list.length - 1), c]; });
    }
    if (painted.has(key)) return Array.isArray(value) ? value.map(colour) : colour(value);
    if (Array.isArray(value)) return value.length && typeof value[0] === "object" ? value.map(function (v) { return paint(v); }) : value;
    if (value && typeof value === "object") {
      const copy = {};
      for (const name of Object.keys(value)) copy[name] = paint(value[name], name);
      return copy;
    }
    return value;
  }

  /* Numbers: written out, or looked up in the arrays that the page carries once. */
  const chosen = {}, worded = {};
  function taken(array, at) {
    if (!at.length || array === null || array === undefined) return array === undefined ? null : array;
    const rest = at.slice(1);
    if (at[0] === "*") return array.map(function (part) { return taken(part, rest); });
    if (Array.isArray(at[0])) return at[0].map(function (i) { return taken(array[i], rest); });
    return taken(array[at[0]], rest);
  }
  function index(part, each) {
    if (part === "#") return each;
    if (typeof part !== "string" || part[0] !== "$") return part;
    const names = part.slice(1).split(">"), value = chosen[names[0]] || 0;
    return names.length > 1 ? arrays[names[1]][value] : value;
  }
  function scaled(value, factor, plus) {
    if (Array.isArray(value)) return value.map(function (v, i) { return scaled(v, Array.isArray(factor) ? factor[i] : factor, Array.isArray(plus) ? plus[i] : plus); });
    return value === null || value === undefined ? null : value * factor + (plus || 0);
  }
  function looked(value, each) {
    if (!value || typeof value !== "object" || Array.isArray(value) || !value.r) return value;
    const found = taken(arrays[value.r[0]], value.r.slice(1).map(function (part) { return index(part, each); }));
    if (value.times === undefined && value.plus === undefined) return found;
    return scaled(found, value.times === undefined ? 1 : looked(value.times, each), value.plus);
  }
  function number(v) {
    if (v === null || v === undefined) return "–";
    const size = Math.abs(v);
    const text = size >= 1e5 || (size < 1e-3 && size > 0) ? v.toExponential(2) : String(Number(v.toPrecision(4)));
    return text.replace("-", "−");
  }

  /* A trace is completed: its band beneath, its whiskers, its words. */
  function band(x, y, low, high, colour, meta) {
    const xs = [], ys = [];
    let run = [];
    function end() {
      if (run.length > 1) {
        if (xs.length) { xs.push(null); ys.push(null); }
        run.forEach(function (i) { xs.push(x[i]); ys.push(low[i]); });
        run.slice().reverse().forEach(function (i) { xs.push(x[i]); ys.push(high[i]); });
      }
      run = [];
    }
    x.forEach(function (_, i) { if (y[i] === null) return; if (low[i] === null || high[i] === null || low[i] === undefined) end(); else run.push(i); });
    end();
    return xs.length ? [{ type: "scatter", mode: "lines", x: xs, y: ys, fill: "toself", fillcolor: colour, line: { width: 0, color: colour }, hoverinfo: "skip", showlegend: false, meta: meta }] : [];
  }
  function whiskers(middle, low, high, colour) {
    function gap(a, b) { return a === null || b === null || a === undefined || b === undefined ? 0 : Math.max(0, a - b); }
    return { type: "data", array: middle.map(function (v, i) { return gap(high[i], v); }), arrayminus: middle.map(function (v, i) { return gap(v, low[i]); }), thickness: 1.2, width: 3, color: colour };
  }
  function ends(trace, low, high, i) {
    if (!low || !high || low[i] === null || high[i] === null || low[i] === undefined) return "";
    return "<br>" + trace.reach + " " + number(low[i]) + " to " + number(high[i]);
  }
  function told(trace, values, low, high) {
    return values.map(function (v, i) {
      const words = trace.name ? ["<b>" + trace.name + "</b>"] : [];
      if (trace.where) words.push(trace.where[i]);
      if (trace.facts) trace.facts.forEach(function (fact) { words.push(fact[0] + " " + number(fact[1][i])); });
      else words.push("<b>" + number(v) + "</b>" + ends(trace, low, high, i));
      return words.join("<br>");
    });
  }
  const plotted = new Set(["x", "y", "z", "low", "high", "text", "where"]);
  function one(trace, each) {
    const whole = {};
    Object.keys(trace).forEach(function (k) { whole[k] = plotted.has(k) ? looked(trace[k], each) : trace[k]; });
    if (trace.type !== "heatmap") ["x", "y", "low", "high"].forEach(function (k) { if (Array.isArray(whole[k])) whole[k] = whole[k].flat(9); });
    if (Array.isArray(whole.name)) whole.name = whole.name[each];
    if (whole.facts) whole.facts = whole.facts.map(function (f) { return [f[0], looked(f[1], each).flat(9)]; });
    if (whole.marker) whole.marker = Object.assign({}, whole.marker, { color: looked(whole.marker.color, each) });
    if (trace.each) { /* series of one look differ in colour */
      ["line", "marker"].forEach(function (part) {
        if (whole[part] && Array.isArray(whole[part].color)) whole[part] = Object.assign({}, whole[part], { color: whole[part].color[each] });
      });
      if (whole.marker && whole.marker.line && Array.isArray(whole.marker.line.color)) whole.marker.line = Object.assign({}, whole.marker.line, { color: whole.marker.line.color[each] });
    }
    if (whole.marker && whole.marker.hollow) {
      const own = whole.marker.color, marker = Object.assign({}, whole.marker, { color: whole.marker.hollow.map(function (h) { return h ? "@paper" : own; }) });
      delete marker.hollow;
      whole.marker = marker;
    }
    return whole;
  }
  function strokes(trace) { /* a stroke from its start to each point, and a mark at its end */
    const x = [], y = [], start = trace.start, end = Object.assign({}, trace, { mode: "markers" });
    trace.x.forEach(function (v, i) {
      if (v === null || trace.y[i] === null) return;
      x.push(start[0][i], v, null); y.push(start[1][i], trace.y[i], null);
    });
    delete end.start;
    const line = { type: "scatter", mode: "lines", x: x, y: y, line: trace.line, hoverinfo: "skip", showlegend: false };
    return trace.marker ? [line, end] : [line];
  }
  function complete(trace) {
    if (trace.each) return [].concat.apply([], Array.from({ length: trace.each }, function (_, i) { return finished(one(trace, i)); }));
    return finished(one(trace, 0));
  }
  function finished(trace) {
    const low = trace.low, high = trace.high, colour = trace.line ? trace.line.color : trace.marker ? trace.marker.line.color : "@s1";
    const parts = [];
    if (trace.type === "heatmap") {
      if (low) {
        trace.text = trace.z.map(function (row, j) { return row.map(function (v, i) { return "<b>" + number(v) + "</b>" + ends(trace, low[j], high[j], i); }); });
        trace.hovertemplate = "%{y} · %{x}<br>%{text}<extra></extra>";
      }
    } else if (!trace.hoverinfo && !trace.hovertemplate) {
      if (!trace.text) trace.text = told(trace, trace.bars === "x" ? trace.x : trace.y, low, high);
      trace.hovertemplate = "%{text}<extra></extra>";
    }
    if (low && trace.band) parts.push.apply(parts, band(trace.x, trace.y, low, high, String(colour).split("/")[0] + "/" + trace.band, trace.meta));
    if (low && trace.bars) trace["error_" + trace.bars] = whiskers(trace.bars === "x" ? trace.x : trace.y, low, high, colour);
    ["low", "high", "band", "bars", "reach", "where", "facts", "each"].forEach(function (k) { delete trace[k]; });
    if (trace.mode === "none") return parts;
    return trace.start ? strokes(trace) : parts.concat(trace);
  }

  /* A figure may have several views; the selections say which is shown. */
  function filled(text) { return text.replace(/\{([\w-]+\.\d+)\}/g, function (_, name) { return worded[name] || ""; }); }
  function view(spec) {
    if (!spec.views) return spec;
    const found = spec.views[spec.by.map(function (name) { return chosen[name] || 0; }).join("|")], layout = Object.assign({}, spec.layout);
    if (!found) {
      const note = { text: "not measured", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 };
      return { data: [], missing: true, layout: Object.assign(layout, { annotations: [note], xaxis: { visible: false }, yaxis: { visible: false } }) };
    }
    ["x", "y"].forEach(function (c) { layout[c + "axis"] = Object.assign({}, layout[c + "axis"], found[c]); });
    ["shapes", "annotations", "margin"].forEach(function (k) { if (found[k]) layout[k] = found[k]; });
    const data = found.data.map(function (trace) { /* what traces have in common is kept once */
      const whole = Object.assign({}, spec.styles[trace.style], trace);
      delete whole.style;
      ["x", "where"].forEach(function (k) { if (typeof whole[k] === "number") whole[k] = spec.shared[whole[k]]; });
      return whole;
    });
    return { data: data.concat(spec.data), layout: layout };
  }
  function placed(layout) { /* what hangs on a choice: ranges, upright rules, words */
    Object.keys(layout).forEach(function (k) {
      if (/^[xy]axis/.test(k) && layout[k].range) layout[k] = Object.assign({}, layout[k], { range: looked(layout[k].range, 0) });
    });
    layout.shapes = (layout.shapes || []).map(function (shape) {
      return Object.assign({}, shape, { x0: looked(shape.x0, 0), x1: looked(shape.x1, 0) });
    });
    layout.annotations = (layout.annotations || []).map(function (note) { return Object.assign({}, note, { text: filled(note.text) }); });
    return layout;
  }

  const svgButton = {
    name: "svg", title: "Download plot as SVG",
    icon: { width: 24, height: 24, path: "M12 3v10.6l3.3-3.3 1.4 1.4L12 16.4 7.3 11.700l1.4-1.4 3.300 3.300V3zM4 19h16v2H4z" },
    click: function (node) { Plotly.downloadImage(node, { format: "svg", filename: fileName(node), width: node.clientWidth, height: node.clientHeight }); }
  };
  function fileName(node) { return (node.dataset.name || node.id).toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60); }

  function draw(id, width) {
    const node = document.getElementById(id);
    if (!node || !specs[id] || typeof Plotly === "undefined" || node.closest("[hidden]")) return;
    const spec = view(specs[id]), layout = placed(paint(spec.layout));
    if (specs[id].page) node.closest("figure").style.display = spec.missing && !/-1$/.test(id) ? "none" : "";
    let data = [].concat.apply([], spec.data.map(complete)).map(function (trace) {
      const copy = paint(trace);
      copy.visible = !(trace.meta && hidden.has(trace.meta.line));
      return copy;
    });
    data = data.filter(function (t) { return t.fill === "toself"; }).concat(data.filter(function (t) { return t.fill !== "toself"; }));
    layout.hoverlabel = Object.assign({}, layout.hoverlabel, {
      bgcolor: property("raised"), bordercolor: property("rule"), font: { size: 12, color: property("ink") }
    });
    layout.font.color = property("soft");
    layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: property("soft"), activecolor: property("ink") };
    layout.dragmode = coarse ? false : "zoom";
    layout.autosize = !width;
    if (width) { layout.width = width; layout.height = parseInt(node.style.height, 10) || width * 0.9; }
    Plotly.react(node, data, layout, {
      displaylogo: false, responsive: true, displayModeBar: coarse ? false : "hover",
      toImageButtonOptions: { filename: fileName(node), scale: 2 },
      modeBarButtons: [["toImage", svgButton, "zoom2d", "pan2d", "resetScale2d"]]
    });
    drawn.add(id);
  }
  function redraw() { drawn.forEach(function (id) { draw(id); }); }

  /* A figure is drawn again where it names what has changed. */
  let texts = {};
  function hangs(id, name) {
    if (texts[id] === undefined) texts[id] = JSON.stringify(specs[id] || {});
    return ((specs[id] || {}).by || []).includes(name) || texts[id].includes("$" + name) || texts[id].includes("{" + name + "}");
  }
  function load(data) {
    specs = data.specs || {};
    arrays = data.arrays || {};
    texts = {};
    drawn.forEach(function (id) { if (!specs[id] || !document.getElementById(id)) drawn.delete(id); });
  }
  page.charts = { load: load, draw: draw, redraw: redraw, hangs: hangs, colour: colour, chosen: chosen, worded: worded, hidden: hidden, drawn: drawn, names: function () { return Object.keys(specs); } };
})(window.anisoscope = window.anisoscope || {});
