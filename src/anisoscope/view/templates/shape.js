(function () {
  "use strict";
  /* Views over training: everything is drawn from one set of numbers, measure × arm × place × step. */
  const source = document.getElementById("shape-data");
  if (!source || !window.anisoscope) return;
  const cube = JSON.parse(source.textContent), page = window.anisoscope, make = page.makers;
  const last = cube.steps.length - 1;
  function escaped(text) { return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;"); }
  function measure() { return Number((page.chosen.shape || [0])[0]); }
  function moment() { const t = (page.chosen.shape || [])[1]; return t === undefined ? last : Number(t); }
  function picked(name, i) { return Number((page.chosen[name] || [])[i] || 0); }
  function number(v) {
    if (v === null || v === undefined) return "–";
    const size = Math.abs(v);
    const text = size >= 1e5 || (size < 1e-3 && size > 0) ? v.toExponential(2) : String(Number(v.toPrecision(4)));
    return text.replace("-", "−");
  }
  function mean(values) {
    const good = values.filter(function (v) { return v !== null && v !== undefined; });
    return good.length ? good.reduce(function (a, b) { return a + b; }, 0) / good.length : null;
  }
  function at(found, i, t) { return mean(found.v.map(function (seed) { return seed[i][t]; })); }
  function interval(found, i, t) {
    if (found.lo && found.hi) return [found.lo[i][t], found.hi[i][t]];
    const good = found.v.map(function (seed) { return seed[i][t]; }).filter(function (v) { return v !== null; });
    return good.length > 1 ? [Math.min.apply(null, good), Math.max.apply(null, good)] : [null, null];
  }
  function told(found, i, t) {
    const ends = interval(found, i, t), value = "<b>" + number(at(found, i, t)) + "</b>";
    if (ends[0] === null || ends[1] === null) return value;
    return value + "<br>" + (found.lo ? "interval " : "seeds from ") + number(ends[0]) + " to " + number(ends[1]);
  }
  function same(k, text) { return Array(k).fill(text); }
  /* The last measured step of an arm up to a moment: arms may end at different steps. */
  function upTo(found, t) {
    for (let s = t; s > 0; s -= 1) if (found.v.some(function (seed) { return seed.some(function (row) { return row[s] !== null; }); })) return s;
    return t;
  }

  /* One scale for what is to be compared: all arms, places and steps of a measure. */
  const spans = {};
  function span(m, arms) {
    const key = m + ":" + (arms || "");
    if (spans[key]) return spans[key];
    let low = Infinity, high = -Infinity;
    cube.numbers[m].forEach(function (found, a) {
      if (!found.v || (arms && !arms.includes(a))) return;
      found.v.concat(found.lo ? [found.lo, found.hi] : []).forEach(function (rows) {
        rows.forEach(function (row) { row.forEach(function (v) { if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); } }); });
      });
    });
    return (spans[key] = [low, high]);
  }
  function scale(ends) {
    const low = ends[0], high = ends[1];
    if (!isFinite(low)) return {};
    if (low > 0 && high / low > 100) return { type: "log", range: [Math.log10(low) - 0.1, Math.log10(high) + 0.1], nticks: 4, tickfont: { size: 9.5 } };
    const reach = (high - low) || Math.abs(high) || 1;
    if (low >= 0 && low < 0.4 * high) return { type: "linear", range: [0, 1.06 * high] };
    return { type: "linear", range: [low - 0.08 * reach, high + 0.08 * reach] };
  }
  function value(more) {
    return Object.assign({ gridcolor: "@rule", zeroline: false, nticks: 6, exponentformat: "power", tickcolor: "@rule", automargin: true }, more);
  }
  function time(more) {
    const axis = { tickvals: cube.ticks[0], ticktext: cube.ticks[1], range: cube.range, showgrid: false, zeroline: false, tickangle: 0 };
    axis.title = { text: "step", standoff: 6, font: { size: 11 } };
    return Object.assign(axis, { linecolor: "@rule", showline: true }, more);
  }
  function missing(spec, words) {
    const note = { text: words || "not measured", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 };
    return { data: [], layout: Object.assign({}, spec.layout, { annotations: [note], xaxis: { visible: false }, yaxis: { visible: false } }) };
  }
  function now() {
    return { type: "line", xref: "x", yref: "paper", x0: cube.x[moment()], x1: cube.x[moment()], y0: 0, y1: 1, line: { color: "@soft", width: 1, dash: "dot" } };
  }
  function depthColour(site, blocks) { return site[1] === "final" ? "@accent" : "@seq:" + (site[0] / Math.max(1, blocks)).toFixed(3); }
  function band(x, low, high, colour, more) {
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
    x.forEach(function (_, i) { if (low[i] === null || high[i] === null || x[i] === null) end(); else run.push(i); });
    end();
    return xs.length ? [Object.assign({ type: "scatter", mode: "lines", x: xs, y: ys, fill: "toself", fillcolor: colour, line: { width: 0, color: colour }, hoverinfo: "skip", showlegend: false }, more)] : [];
  }
  function line(x, y, look, more) {
    return Object.assign({ type: "scatter", mode: look.size ? "lines+markers" : "lines", x: x, y: y, connectgaps: !!look.gaps, showlegend: false,
      line: { color: look.colour, width: look.width || 1.5, dash: look.dash || "solid" },
      marker: { size: look.size || 4, color: look.colour, symbol: look.symbol || "circle" } }, more);
  }

  /* A line per layer over steps, above loss and gradient norm on the same axis. */
  make.course = function (spec) {
    const m = measure(), found = cube.numbers[m][spec.arm], arm = cube.arms[spec.arm], sites = cube.measures[m].sites;
    if (!found.v) return missing(spec);
    const bands = [], thin = [], lines = [], all = cube.steps.map(function (_, t) { return t; });
    sites.forEach(function (site, i) {
      const colour = depthColour(site, arm.blocks), dash = site[1] === "final" ? "dash" : "solid";
      const y = all.map(function (t) { return at(found, i, t); });
      if (y.every(function (v) { return v === null; })) return;
      if (found.lo) { /* of the steps that this arm has: others may have been looked at elsewhere */
        const own = all.filter(function (t) { return y[t] !== null; }), of = function (row) { return own.map(function (t) { return row[t]; }); };
        bands.push.apply(bands, band(of(cube.x), of(found.lo[i]), of(found.hi[i]), colour + (colour[1] === "a" ? "/0.08" : "/0.1")));
      }
      if (found.v.length > 1) found.v.forEach(function (seed) { thin.push(line(cube.x, seed[i], { colour: colour + "/0.3", width: 0.8, dash: dash, gaps: true }, { hoverinfo: "skip" })); });
      lines.push(line(cube.x, y, { colour: colour, size: 3.5, dash: dash, gaps: true }, {
        text: all.map(function (t) { return "<b>" + escaped(site[2]) + "</b><br>step " + cube.steps[t].toLocaleString("en") + "<br>" + told(found, i, t); }),
        hovertemplate: "%{text}<extra></extra>" }));
    });
    const layout = Object.assign({}, spec.layout), loop = loopTraces(spec.arm);
    layout.xaxis = time({ showspikes: true, spikemode: "across", spikethickness: 1, spikedash: "solid", spikecolor: "#8888", anchor: loop.length ? "y2" : "y" });
    layout.yaxis = value(Object.assign(scale(span(m)), { domain: loop.length ? [0.36, 1] : [0, 1], anchor: "x" }));
    if (loop.length) {
      layout.yaxis2 = value({ domain: [0, 0.27], anchor: "x", nticks: 4, title: { text: "loss", font: { size: 11 }, standoff: 8 }, range: loopSpan() });
      layout.yaxis3 = value({ overlaying: "y2", side: "right", anchor: "x", nticks: 3, showgrid: false, type: "log", title: { text: "gradient norm", font: { size: 11, color: "@s2" }, standoff: 4 }, tickfont: { size: 9, color: "@s2" }, tickmode: "array", tickvals: normEnds(), ticktext: normEnds().map(number), range: normRange() });
    }
    layout.shapes = [now()];
    return { data: bands.concat(thin, lines, loop), layout: layout };
  };
  function loopSpan() {
    let low = Infinity, high = -Infinity;
    cube.loop.forEach(function (loop) {
      ["loss", "probe_loss"].forEach(function (name) {
        (loop[name] || []).forEach(function (pair) { pair[1].forEach(function (v) { if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); } }); });
      });
    });
    return isFinite(low) ? [low - 0.08 * (high - low || 1), high + 0.08 * (high - low || 1)] : [0, 1];
  }
  function normEnds() { /* two plain ticks: an overlaid axis would take over the other's */
    let low = Infinity, high = -Infinity;
    cube.loop.forEach(function (loop) { (loop.gradient_norm || []).forEach(function (pair) { pair[1].forEach(function (v) { if (v > 0) { low = Math.min(low, v); high = Math.max(high, v); } }); }); });
    return isFinite(low) ? [low, high].map(function (v) { return Number(v.toPrecision(2)); }) : [];
  }
  function normRange() {
    const ends = normEnds().map(Math.log10), pad = 0.08 * ((ends[1] - ends[0]) || 1);
    return ends.length ? [ends[0] - pad, ends[1] + pad] : [0, 1];
  }
  function loopTraces(a) {
    const loop = cube.loop[a], looks = { loss: { colour: "@ink/0.35", width: 1, axis: "y2", words: "training loss" },
      probe_loss: { colour: "@ink", width: 1.6, size: 3, axis: "y2", words: "probe loss" },
      gradient_norm: { colour: "@s2/0.75", width: 1.2, dash: "dot", axis: "y3", words: "gradient norm" } };
    const traces = [];
    Object.keys(looks).forEach(function (name) {
      (loop[name] || []).forEach(function (pair, s) {
        const look = looks[name], seed = loop[name].length > 1 ? ", seed " + cube.arms[a].seeds[s] : "";
        traces.push(line(pair[0], pair[1], look, { yaxis: look.axis, hovertemplate: look.words + seed + "<br><b>%{y:.4~g}</b><extra></extra>" }));
      });
    });
    return traces;
  }

  /* Steps by layers. */
  make.grid = function (spec) {
    const m = measure(), found = cube.numbers[m][spec.arm];
    if (!found.v) return missing(spec);
    const sites = cube.measures[m].sites, kept = sites.map(function (_, i) { return i; }).filter(function (i) {
      return cube.steps.some(function (_, t) { return at(found, i, t) !== null; });
    });
    const z = kept.map(function (i) { return cube.steps.map(function (_, t) { return at(found, i, t); }); });
    const text = kept.map(function (i) { return cube.steps.map(function (_, t) { return told(found, i, t); }); });
    const ends = span(m), every = Math.max(1, Math.ceil(cube.steps.length / 8)), high = Math.max(1, Math.ceil(kept.length / 14));
    const trace = { type: "heatmap", z: z, text: text, x: cube.steps.map(function (s) { return "step " + s.toLocaleString("en"); }),
      y: kept.map(function (i) { return escaped(sites[i][2]); }), colorscale: "@heat", xgap: 1, ygap: 1, hoverongaps: false, zmin: ends[0], zmax: ends[1],
      hovertemplate: "%{y} · %{x}<br>%{text}<extra></extra>", colorbar: { thickness: 9, outlinewidth: 0, nticks: 5, tickfont: { size: 10 } } };
    const quiet = { type: "category", showgrid: false, zeroline: false, automargin: true, ticks: "", tickangle: 0 };
    const x = cube.steps.map(function (_, t) { return t; }).filter(function (t) { return t % every === 0; });
    const y = kept.map(function (_, i) { return i; }).filter(function (i) { return i % high === 0; });
    return { data: [trace], layout: Object.assign({}, spec.layout, {
      xaxis: Object.assign({ tickvals: x, ticktext: x.map(function (t) { return cube.words[t]; }), title: { text: "step", standoff: 6, font: { size: 11 } } }, quiet),
      yaxis: Object.assign({ tickvals: y, ticktext: y.map(function (i) { return escaped(sites[kept[i]][3]); }) }, quiet) }) };
  };

  /* Over depth at one step: all arms together, by relative depth where their depths differ. */
  function depths(arms) {
    const blocks = arms.map(function (a) { return cube.arms[a].blocks; }), most = Math.max.apply(null, blocks);
    const relative = blocks.some(function (b) { return b !== most; });
    const whole = relative ? 1 : most, final = whole * 1.12 + (relative ? 0 : Math.max(0, 1 - 0.12 * whole));
    return { whole: whole, final: final, relative: relative, place: function (site, a) {
      return site[1] === "final" ? final : relative ? site[0] / Math.max(1, cube.arms[a].blocks) : site[0]; } };
  }
  function depthAxis(depth, sites, more) {
    const step = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25].find(function (s) { return depth.whole / s <= 8; }) || 25;
    let ticks = depth.relative ? [0, 0.25, 0.5, 0.75, 1] : [], text = depth.relative ? ["embed", "¼", "½", "¾", "1"] : [];
    if (!depth.relative) for (let b = 0; b <= depth.whole; b += step) { ticks.push(b); text.push(b ? String(b) : "embed"); }
    if (sites.some(function (s) { return s[1] === "final"; })) { ticks.push(depth.final); text.push("final"); }
    if (!sites.some(function (s) { return s[0] === 0; })) { ticks = ticks.slice(1); text = text.slice(1); }
    return Object.assign({ tickvals: ticks, ticktext: text, showgrid: false, zeroline: false, tickangle: 0, linecolor: "@rule", showline: true,
      range: [-0.05 * depth.whole, depth.final + 0.06 * depth.whole],
      title: { text: depth.relative ? "relative depth" : "block", standoff: 6, font: { size: 11 } } }, more);
  }
  function hue(arm) { return "@s" + arm.hue; }
  function profile(m, now, arms, colours) {
    const sites = cube.measures[m].sites, depth = depths(arms), bands = [], thin = [], lines = [];
    arms.forEach(function (a, k) {
      const found = cube.numbers[m][a], arm = cube.arms[a], colour = colours ? colours[k] : hue(arm), meta = colours ? {} : { meta: { line: arm.line } };
      if (!found.v) return;
      const t = upTo(found, now);
      [false, true].forEach(function (final) { /* the final norm stands apart: it is no block */
        const mine = sites.map(function (_, i) { return i; }).filter(function (i) { return (sites[i][1] === "final") === final && at(found, i, t) !== null; });
        if (!mine.length) return;
        const x = mine.map(function (i) { return depth.place(sites[i], a); });
        const ends = mine.map(function (i) { return interval(found, i, t); });
        const low = ends.map(function (e) { return e[0]; }), high = ends.map(function (e) { return e[1]; });
        bands.push.apply(bands, band(x, low, high, colour + "/0.16", meta));
        if (found.v.length > 1) found.v.forEach(function (seed) {
          thin.push(line(x, mine.map(function (i) { return seed[i][t]; }), { colour: colour + "/0.4", width: 0.9, size: final ? 3 : 0 }, Object.assign({ hoverinfo: "skip" }, meta)));
        });
        const y = mine.map(function (i) { return at(found, i, t); });
        const bars = final && low[0] !== null ? { error_y: { type: "data", array: y.map(function (v, j) { return Math.max(0, high[j] - v); }), arrayminus: y.map(function (v, j) { return Math.max(0, v - low[j]); }), thickness: 1.2, width: 3, color: colour } } : {};
        lines.push(line(x, y, { colour: colour, width: 2, size: final ? 7 : 5, symbol: final ? "diamond" : "circle" }, Object.assign({
          text: mine.map(function (i) { return "<b>" + escaped(arm.label) + "</b><br>" + escaped(sites[i][2]) + "<br>" + told(found, i, t); }), hovertemplate: "%{text}<extra></extra>" }, meta, bars)));
      });
    });
    return { data: bands.concat(thin, lines), axis: depthAxis(depth, sites) };
  }
  function every() { return cube.arms.map(function (_, a) { return a; }); }
  make.profile = function (spec) {
    const m = measure(), drawn = profile(m, moment(), every());
    return { data: drawn.data, layout: Object.assign({}, spec.layout, { xaxis: drawn.axis, yaxis: value(scale(span(m))) }) };
  };
  make.ablation = function (spec) {
    const m = cube.ablation[picked("ablation", 0)];
    const drawn = profile(m, last, spec.arms, spec.arms.map(function (_, k) { return "@s" + (k + 1); }));
    return { data: drawn.data, layout: Object.assign({}, spec.layout, { xaxis: drawn.axis, yaxis: value(scale(span(m, spec.all))) }) };
  };

  /* The scale of the blocks: few different rows leave the embedding of a character model, and its dimension far above. */
  function blockSpan(m, whole) {
    let low = Infinity, high = -Infinity;
    cube.numbers[m].forEach(function (found) {
      (found.v || []).forEach(function (seed) { seed.forEach(function (row, i) {
        if (whole || cube.measures[m].sites[i][1] !== "embed") row.forEach(function (v) { if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); } });
      }); });
    });
    return [low, high];
  }

  /* Intrinsic dimension by every estimator: over steps at one place, over depth at one step. */
  make.dimension = function (spec) {
    const arm = cube.arms[spec.arm], all = cube.steps.map(function (_, i) { return i; }), data = [], depth = depths([spec.arm]);
    const places = cube.dimension.places, place = places[picked("dimension", 0)];
    let ends = [Infinity, -Infinity], sites = [], t = moment();
    cube.dimension.lines.forEach(function (entry) {
      const s = blockSpan(entry.measure, place[1] === "embed");
      ends = [Math.min(ends[0], s[0]), Math.max(ends[1], s[1])];
      const found = cube.numbers[entry.measure][spec.arm], mine = cube.measures[entry.measure].sites;
      if (!found.v) return;
      t = upTo(found, moment());
      const look = { colour: entry.colour, dash: entry.dash, size: 4, width: entry.width, gaps: true };
      const here = mine.findIndex(function (s) { return (place[1] === "resid" ? s[1] === "resid" && s[0] === Math.max(1, Math.round(place[0] * arm.blocks)) : s[1] === place[1]); });
      function trace(x, index, time, axes) {
        const bars = found.sd ? { error_y: { type: "data", array: index.map(function (i, k) { return found.sd[i][time[k]] || 0; }), thickness: 0.9, width: 2, color: entry.colour } } : {};
        const kept = index.map(function (i, k) { return at(found, i, time[k]); });
        data.push(line(x, kept, look, Object.assign({ text: index.map(function (i, k) {
          const sd = found.sd ? found.sd[i][time[k]] : null;
          return "<b>" + escaped(entry.name) + "</b><br>" + escaped(mine[i][2]) + ", step " + cube.steps[time[k]].toLocaleString("en") + "<br><b>" + number(kept[k]) + "</b>" + (sd === null ? "" : "<br>sd over batches " + number(sd));
        }), hovertemplate: "%{text}<extra></extra>" }, bars, axes)));
      }
      if (here >= 0) trace(cube.x, same(all.length, here), all, {});
      const order = mine.map(function (_, i) { return i; }).filter(function (i) { return mine[i][1] !== "final"; });
      sites = mine.filter(function (s) { return s[1] !== "final"; });
      trace(order.map(function (i) { return depth.place(mine[i], spec.arm); }), order, same(order.length, t), { xaxis: "x2", yaxis: "y2" });
    });
    if (!data.length) return missing(spec);
    const y = scale(ends), right = depthAxis(depth, sites, { domain: [0.56, 1], anchor: "y2" });
    right.range = [-0.05 * depth.whole, 1.05 * depth.whole];
    const head = { showarrow: false, xref: "paper", yref: "paper", y: 1, yanchor: "bottom", xanchor: "left", font: { size: 11.5 } };
    const name = cube.measures[cube.dimension.lines[0].measure].sites, found = name.find(function (s) { return place[1] === "resid" ? s[1] === "resid" && s[0] === Math.max(1, Math.round(place[0] * arm.blocks)) : s[1] === place[1]; });
    return { data: data, layout: Object.assign({}, spec.layout, { margin: { l: 46, r: 10, t: 26, b: 40 }, shapes: [now()],
      xaxis: time({ domain: [0, 0.46] }), yaxis: value(y), xaxis2: right, yaxis2: value(Object.assign({ anchor: "x2" }, y)),
      annotations: [Object.assign({ x: 0, text: "over steps, " + (found ? escaped(found[2]) : "") }, head), Object.assign({ x: 0.56, text: "over layers, step " + cube.steps[t].toLocaleString("en") }, head)] }) };
  };

  /* The same rows at every step, on axes that do not move. */
  make.rows = function (spec) {
    const arms = cube.rows.arms[String(spec.arm)] || {}, entry = arms[String(picked("rows", 0))];
    if (!entry) return missing(spec, "no rows were kept here, only at:<br>" + Object.keys(arms).map(function (k) { return escaped(cube.rows.places[k]); }).join(", "));
    const wanted = cube.rows.colours[picked("rows", 1)] || "", counted = entry.frequency.some(function (f) { return f !== null; });
    const by = wanted === "frequency" && !counted ? "position" : wanted; /* frames and patches have no frequency */
    const known = Object.keys(entry.at).map(Number).filter(function (s) { return s <= cube.steps[moment()]; });
    const step = known.length ? Math.max.apply(null, known) : Number(Object.keys(entry.at)[0]), xy = entry.at[String(step)];
    const groups = by === "group" ? Array.from(new Set(entry.group)).sort() : [];
    const far = Math.max.apply(null, entry.position.concat(1));
    const colours = entry.token.map(function (_, i) {
      if (by === "frequency") return entry.frequency[i] === null ? "@rule" : "@seq:" + ((entry.frequency[i] - 1) / 4).toFixed(3) + "/0.8";
      if (by === "position") return "@seq:" + (entry.position[i] / far).toFixed(3) + "/0.8";
      return by === "group" ? "@s" + (groups.indexOf(entry.group[i]) % 8 + 1) + "/0.8" : "@s1/0.7";
    });
    const text = entry.token.map(function (token, i) {
      return (token ? "<b>" + escaped(token) + "</b><br>" : "") + "position " + entry.position[i] + (entry.frequency[i] === null ? "" : "<br>frequency bin " + entry.frequency[i]) + (entry.group[i] ? "<br>" + escaped(entry.group[i]) : "");
    });
    function ends(c) {
      let low = Infinity, high = -Infinity;
      Object.keys(entry.at).forEach(function (s) { entry.at[s][c].forEach(function (v) { if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); } }); });
      const pad = 0.06 * (high - low || 1);
      return [low - pad, high + pad];
    }
    function axis(c) {
      const share = entry.shares[c] === undefined ? "" : " (" + Number((100 * entry.shares[c]).toPrecision(3)) + " % of variance)";
      return value({ range: ends(c), nticks: 5, title: { text: "axis " + (c + 1) + share, font: { size: 11 }, standoff: 6 } });
    }
    const key = groups.length > 1 ? groups.slice(0, 8).map(function (name, g) { return '<br><span style="color:' + page.colour("@s" + (g + 1)) + '">●</span> ' + escaped(name || "none"); }).join("") : "";
    const note = { text: escaped(entry.name) + ", step " + step.toLocaleString("en") + (by !== wanted ? ", by position" : "") + key, align: "left", showarrow: false, xref: "paper", yref: "paper", x: 0.01, y: 0.99, xanchor: "left", yanchor: "top", font: { size: 11 } };
    return { data: [{ type: "scatter", mode: "markers", x: xy[0], y: xy[1], text: text, hovertemplate: "%{text}<extra></extra>", showlegend: false,
      marker: { size: 5.5, color: colours, line: { width: 0 } } }], layout: Object.assign({}, spec.layout, { xaxis: axis(0), yaxis: axis(1), annotations: [note] }) };
  };

  /* The slider, its words, and play. */
  const slider = document.getElementById("moment-step"), play = document.getElementById("moment-play"), words = document.getElementById("moment-words");
  if (!slider) return;
  function say() { words.textContent = "step " + cube.steps[Number(slider.value)].toLocaleString("en"); slider.setAttribute("aria-valuetext", words.textContent); }
  slider.addEventListener("input", function () {
    say();
    page.drawn.forEach(function (id) {
      if (page.specs[id].make !== "course") return; /* only the mark of the step moves: no need to draw all lines again */
      const mark = now();
      mark.line.color = page.colour(mark.line.color);
      Plotly.relayout(id, { shapes: [mark] });
    });
  });
  let timer = 0;
  function stop() { clearInterval(timer); timer = 0; play.textContent = "▶ Play"; }
  play.addEventListener("click", function () {
    if (timer) { stop(); return; }
    if (Number(slider.value) >= last) { slider.value = "0"; slider.dispatchEvent(new Event("input")); }
    play.textContent = "❚❚ Pause";
    timer = setInterval(function () {
      if (Number(slider.value) >= last) { stop(); return; }
      slider.value = String(Number(slider.value) + 1);
      slider.dispatchEvent(new Event("input"));
    }, 900);
  });
  say();
})();
