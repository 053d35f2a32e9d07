(function () {
  "use strict";
  /* Mean queries and keys by head, their paths over steps, and how sharp attention is: drawn from one set of numbers. */
  const source = document.getElementById("attention-data");
  if (!source || !window.anisoscope) return;
  const all = JSON.parse(source.textContent), page = window.anisoscope, make = page.makers;
  const last = Math.max(0, all.steps.length - 1), perPage = 12;
  function picked(name, i, otherwise) { const v = (page.chosen[name] || [])[i]; return v === undefined ? otherwise : Number(v); }
  function escaped(text) { return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;"); }
  function number(v) {
    if (v === null || v === undefined) return "–";
    const size = Math.abs(v);
    return (size >= 1e5 || (size < 1e-3 && size > 0) ? v.toExponential(2) : String(Number(v.toPrecision(3)))).replace("-", "−");
  }
  function when(t) { return all.steps.length ? "step " + all.steps[t].toLocaleString("en") : ""; }
  function plane() {
    const models = all.models.filter(function (m) { return Object.keys(m.planes).length; });
    return models[picked("qk", 0, 0)].planes[all.pairs[picked("qk", 1, 0)]];
  }
  function shared() { return picked("qk", 2, 0) === 0; }
  /* Where the mean query ends: the mean key lies along the first axis, so two norms and a cosine say it all. */
  function tip(q, c) { const x = Math.max(-1, Math.min(1, c)); return [q * x, q * Math.sqrt(1 - x * x)]; }
  function known(p, t, l, h) { return p.q[t][l][h] !== null && p.k[t][l][h] !== null && p.c[t][l][h] !== null; }
  function longest(p, times, layers) {
    let most = 0;
    times.forEach(function (t) { layers.forEach(function (l) { p.q[t][l].forEach(function (q, h) {
      if (known(p, t, l, h)) most = Math.max(most, q, p.k[t][l][h]);
    }); }); });
    return most || 1;
  }
  function told(p, t, l, h) {
    const words = ["<b>block " + p.layers[l] + " · head " + h + "</b>"];
    if (all.steps.length) words.push(when(t));
    return words.concat("‖mean q‖ " + number(p.q[t][l][h]), "‖mean k‖ " + number(p.k[t][l][h]), "cosine " + number(p.c[t][l][h])).join("<br>");
  }
  function missing(spec) {
    const note = { text: "not measured", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 };
    return { data: [], layout: Object.assign({}, spec.layout, { annotations: [note], xaxis: { visible: false }, yaxis: { visible: false } }) };
  }
  function every(count) { return Array.from({ length: count }, function (_, i) { return i; }); }
  function strided(count, most) { const step = Math.max(1, Math.ceil(count / most)); return every(count).filter(function (i) { return i % step === 0; }); }

  /* Layers by heads: the mean key to the right, the mean query at its angle; a cell is as wide as there is room. */
  const tall = 0.62, left = 44, top = 26, widest = 96, least = 26;
  make.glyphs = function (spec) {
    const p = plane(), node = document.getElementById(spec.node);
    if (!p) return missing(spec);
    const t = Math.min(picked("qkstep", 0, last), p.q.length - 1), heads = p.q[0][0].length, layers = p.layers.length;
    node.style.minWidth = left + 14 + heads * least + "px";
    const room = Math.max(node.clientWidth, left + 14 + heads * least) - left - 14, cell = Math.min(widest, room / heads);
    node.style.height = Math.round(top + 12 + cell * tall * layers) + "px";
    const whole = longest(p, [t], every(layers)), base = [[], []], keys = [[], []], queries = [[], []], tips = [[], [], []], ends = [[], []];
    every(layers).forEach(function (l) {
      const scale = 0.46 / (shared() ? whole : longest(p, [t], [l])), y = -tall * (l + 0.86), angles = picked("qk", 2, 0) === 2;
      every(heads).forEach(function (h) {
        if (!known(p, t, l, h)) return;
        const unit = angles ? 0.46 : scale, x = h + 0.5, end = tip(angles ? 1 : p.q[t][l][h], p.c[t][l][h]), k = angles ? 0.6 : p.k[t][l][h];
        base[0].push(x - 0.46, x + 0.46, null); base[1].push(y, y, null);
        keys[0].push(x, x + unit * k, null); keys[1].push(y, y, null);
        queries[0].push(x, x + unit * end[0], null); queries[1].push(y, y + unit * end[1], null);
        tips[0].push(x + unit * end[0]); tips[1].push(y + unit * end[1]); tips[2].push(told(p, t, l, h));
        ends[0].push(x + unit * k); ends[1].push(y);
      });
    });
    const thick = cell > 50 ? 2.4 : 1.7, dot = cell > 50 ? 6 : 4;
    function segments(xy, colour, width) { return { type: "scatter", mode: "lines", x: xy[0], y: xy[1], line: { color: colour, width: width }, hoverinfo: "skip", showlegend: false }; }
    function dots(x, y, colour, symbol) { return { type: "scatter", mode: "markers", x: x, y: y, text: tips[2], hovertemplate: "%{text}<extra></extra>", showlegend: false, marker: { size: dot, color: colour, symbol: symbol } }; }
    const across = strided(heads, Math.max(2, Math.floor(room / 26))), down = strided(layers, Math.max(2, Math.floor(layers * cell * tall / 14)));
    const quiet = { showgrid: false, zeroline: false, ticks: "", fixedrange: true, tickangle: 0, tickfont: { size: 10 } };
    const layout = Object.assign({}, spec.layout, { margin: { l: left, r: 14, t: top, b: 12 } });
    layout.xaxis = Object.assign({}, quiet, { side: "top", range: [0, room / cell], tickvals: across.map(function (h) { return h + 0.5; }), ticktext: across.map(function (h) { return h === across[0] ? "head " + h : String(h); }) });
    layout.yaxis = Object.assign({}, quiet, { scaleanchor: "x", constrain: "domain", range: [-tall * layers, 0], tickvals: down.map(function (l) { return -tall * (l + 0.6); }), ticktext: down.map(function (l) { return l === down[0] ? "block " + p.layers[l] : String(p.layers[l]); }) });
    return { data: [segments(base, "@rule", 1), segments(keys, "@s2", thick), segments(queries, "@s1", thick), dots(ends[0], ends[1], "@s2", "square"), dots(tips[0], tips[1], "@s1", "circle")], layout: layout };
  };

  /* One layer: the path of every head through the steps, in the plane of its own mean key and mean query. */
  function colourOf(h, heads) { return heads <= 8 ? "@s" + (h + 1) : "@seq:" + (h / (heads - 1)).toFixed(3); }
  function onPage(spec, name, p) {
    const l = perPage * picked(name, 0, 0) + spec.panel, figure = document.getElementById(spec.node).closest("figure");
    const here = Boolean(p) && l < p.layers.length;
    figure.style.display = here || spec.panel === 0 ? "" : "none";
    return here ? l : -1;
  }
  function heading(p, l) { return [{ text: "<b>block " + p.layers[l] + "</b>", showarrow: false, xref: "paper", yref: "paper", x: 0, y: 1, xanchor: "left", yanchor: "bottom", yshift: 2 }]; }
  make.paths = function (spec) {
    const p = plane(), l = onPage(spec, "qkpage", p);
    if (l < 0) return missing(spec);
    const heads = p.q[0][0].length, times = every(p.q.length), most = longest(p, times, shared() ? every(p.layers.length) : [l]);
    const lines = [], marks = [];
    every(heads).forEach(function (h) {
      const seen = times.filter(function (t) { return known(p, t, l, h); });
      if (!seen.length) return;
      const ends = seen.map(function (t) { return tip(p.q[t][l][h], p.c[t][l][h]); }), colour = colourOf(h, heads), n = seen.length - 1;
      const text = seen.map(function (t) { return told(p, t, l, h); }), name = { text: text, hovertemplate: "%{text}<extra></extra>", showlegend: false };
      function path(x, y, symbol, width) {
        lines.push(Object.assign({ type: "scatter", mode: "lines+markers", x: x, y: y, line: { color: colour, width: width }, marker: { size: seen.map(function (_, i) { return i === 0 || i === n ? 0.1 : 2.6; }), color: colour, line: { width: 0 } } }, name));
        marks.push(Object.assign({ type: "scatter", mode: "markers", x: [x[0], x[n]], y: [y[0], y[n]], marker: { size: 6.5, symbol: symbol, color: ["@paper", colour], line: { color: colour, width: 1.4 } } }, name, { text: [text[0], text[n]] }));
      }
      path(seen.map(function (t) { return p.k[t][l][h]; }), seen.map(function () { return 0; }), "square", 2.4);
      path(ends.map(function (e) { return e[0]; }), ends.map(function (e) { return e[1]; }), "circle", 1.4);
    });
    const axis = { zeroline: true, zerolinecolor: "@rule", gridcolor: "@rule", showgrid: false, nticks: 5, tickfont: { size: 10 } };
    const layout = Object.assign({}, spec.layout, { annotations: heading(p, l), margin: { l: 30, r: 8, t: 22, b: 24 } });
    layout.xaxis = Object.assign({}, axis, { range: [-1.08 * most, 1.08 * most], constrain: "domain" });
    layout.yaxis = Object.assign({}, axis, { range: [-0.1 * most, 1.08 * most], scaleanchor: "x", constrain: "domain" });
    return { data: lines.concat(marks), layout: layout };
  };

  /* Measures of attention over steps: mean over the heads of every layer, and the spread of the heads of one. */
  function spread() {
    const models = all.models.filter(function (m) { return Object.keys(m.spreads).length; });
    const model = models[picked("sharp", 1, 0)], measure = all.measures[picked("sharp", 0, 0)];
    return model.spreads[all.kinds[picked("sharp", 2, 0)] + ":" + measure.name];
  }
  function time() {
    const axis = { tickvals: all.ticks[0], ticktext: all.ticks[1], range: all.range, showgrid: false, zeroline: false, tickangle: 0 };
    return Object.assign(axis, { title: { text: "step", standoff: 6, font: { size: 11 } }, linecolor: "@rule", showline: true });
  }
  function value(ends) {
    const axis = { gridcolor: "@rule", zeroline: false, nticks: 5, exponentformat: "power", automargin: true };
    if (ends[0] > 0 && ends[1] / ends[0] > 100) return Object.assign(axis, { type: "log", range: [Math.log10(ends[0]) - 0.1, Math.log10(ends[1]) + 0.1], nticks: 4, tickfont: { size: 9.5 } });
    const reach = (ends[1] - ends[0]) || Math.abs(ends[1]) || 1;
    return Object.assign(axis, { type: "linear", range: ends[0] >= 0 && ends[0] < 0.4 * ends[1] ? [0, 1.06 * ends[1]] : [ends[0] - 0.06 * reach, ends[1] + 0.06 * reach] });
  }
  function reach(s, low, high) {
    let ends = [Infinity, -Infinity];
    s.v.forEach(function (layers) { layers.forEach(function (five) { if (five[0] !== null) ends = [Math.min(ends[0], five[low]), Math.max(ends[1], five[high])]; }); });
    return ends;
  }
  function column(s, l, i) { return s.v.map(function (layers) { return layers[l][i]; }); }
  function words(s, l) {
    return s.v.map(function (layers, t) {
      const five = layers[l];
      return "<b>block " + s.layers[l] + "</b><br>" + when(t) + "<br>mean <b>" + number(five[0]) + "</b><br>heads from " + number(five[1]) + " to " + number(five[4]) + ", half of them from " + number(five[2]) + " to " + number(five[3]);
    });
  }
  function course(s, l, colour, width, size) {
    return { type: "scatter", mode: "lines+markers", x: all.x, y: column(s, l, 0), text: words(s, l), hovertemplate: "%{text}<extra></extra>", connectgaps: true, showlegend: false, line: { color: colour, width: width }, marker: { size: size, color: colour } };
  }
  function band(s, l, low, high, colour) {
    const xs = [], ys = [], there = every(s.v.length).filter(function (t) { return s.v[t][l][0] !== null; });
    there.forEach(function (t) { xs.push(all.x[t]); ys.push(s.v[t][l][low]); });
    there.slice().reverse().forEach(function (t) { xs.push(all.x[t]); ys.push(s.v[t][l][high]); });
    return { type: "scatter", mode: "lines", x: xs, y: ys, fill: "toself", fillcolor: colour, line: { width: 0, color: colour }, hoverinfo: "skip", showlegend: false };
  }
  function depth(s, l) { return "@seq:" + (s.layers[l] / Math.max(1, s.layers[s.layers.length - 1])).toFixed(3); }
  make.sharp = function (spec) {
    const s = spread();
    if (!s) return missing(spec);
    const layout = Object.assign({}, spec.layout, { xaxis: time(), yaxis: value(reach(s, 0, 0)) });
    return { data: s.layers.map(function (_, l) { return course(s, l, depth(s, l), 1.6, 3.5); }), layout: layout };
  };
  make.spread = function (spec) {
    const s = spread(), l = onPage(spec, "sharppage", s);
    if (l < 0) return missing(spec);
    const colour = depth(s, l), layout = Object.assign({}, spec.layout, { annotations: heading(s, l), xaxis: time(), yaxis: value(reach(s, 1, 4)), margin: { l: 40, r: 8, t: 22, b: 36 } });
    return { data: [band(s, l, 1, 4, colour + "/0.14"), band(s, l, 2, 3, colour + "/0.3"), course(s, l, colour, 1.8, 3.5)], layout: layout };
  };
})();
