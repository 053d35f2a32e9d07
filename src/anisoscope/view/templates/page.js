(function () {
  "use strict";
  const root = document.documentElement;
  const specs = JSON.parse(document.getElementById("specs").textContent), arrays = JSON.parse(document.getElementById("arrays").textContent);
  const drawn = new Set(), hidden = new Set();
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
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

  function draw(id, width) {
    const node = document.getElementById(id);
    if (!node || typeof Plotly === "undefined" || node.closest("[hidden]")) return;
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
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]]
    });
    drawn.add(id);
  }
  function redraw() { drawn.forEach(function (id) { draw(id); }); }

  const observer = new IntersectionObserver(function (entries) {
    entries.forEach(function (entry) {
      if (entry.isIntersecting) { observer.unobserve(entry.target); draw(entry.target.id); }
    });
  }, { rootMargin: "700px 0px" });

  /* Selections and sliders; a figure is drawn again where it names what has changed. */
  const texts = {};
  function hangs(id, name) {
    if (texts[id] === undefined) texts[id] = JSON.stringify(specs[id]);
    return (specs[id].by || []).includes(name) || texts[id].includes("$" + name) || texts[id].includes("{" + name + "}");
  }
  document.querySelectorAll("[data-switch]").forEach(function (box) {
    const own = box.dataset.switch, inputs = Array.from(box.querySelectorAll("select, input[type=range]"));
    const says = document.querySelector('[data-says="' + own + '"]'), play = box.querySelector(".play");
    function read() {
      inputs.forEach(function (input, i) {
        const name = own + "." + i;
        chosen[name] = Number(input.value);
        worded[name] = input.options ? input.selectedOptions[0].textContent : input.dataset.words.split("|")[Number(input.value)];
        if (!input.options) { input.parentElement.querySelector("output").textContent = worded[name]; input.setAttribute("aria-valuetext", worded[name]); }
      });
      if (says) says.textContent = inputs.map(function (s) { return s.options ? s.selectedOptions[0].dataset.words || "" : ""; }).join(" ");
    }
    read();
    box.hidden = inputs.every(function (s) { return s.options && s.options.length < 2; });
    inputs.forEach(function (input, i) {
      input.addEventListener(input.options ? "change" : "input", function () {
        read();
        drawn.forEach(function (id) { if (hangs(id, own + "." + i)) draw(id); });
      });
    });
    const slider = inputs.find(function (input) { return !input.options; });
    let timer = 0;
    function move(value) { slider.value = String(value); slider.dispatchEvent(new Event("input")); }
    function stop() { clearInterval(timer); timer = 0; play.textContent = "▶ Play"; }
    if (play) play.addEventListener("click", function () {
      if (timer) { stop(); return; }
      if (Number(slider.value) >= Number(slider.max)) move(0);
      play.textContent = "❚❚ Pause";
      timer = setInterval(function () {
        if (Number(slider.value) >= Number(slider.max)) stop(); else move(Number(slider.value) + 1);
      }, 900);
    });
  });
  document.querySelectorAll(".plot").forEach(function (node) { observer.observe(node); });

  /* Swatches of the ramp: the same colours as the lines. */
  function swatches() {
    document.querySelectorAll("[data-seq]").forEach(function (node) { node.style.setProperty("--c", colour("@seq:" + node.dataset.seq)); });
  }
  swatches();

  /* Theme */
  function theme() { return root.dataset.theme || (dark.matches ? "dark" : "light"); }
  document.getElementById("theme").addEventListener("click", function () {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    try { localStorage.setItem("anisoscope-theme", root.dataset.theme); } catch (e) { /* a file may have no storage */ }
    swatches();
    redraw();
  });
  dark.addEventListener("change", function () { swatches(); redraw(); });

  /* Models on and off, in all charts at once; a figure of one model goes with it */
  function show(line, on) {
    if (on) hidden.delete(line); else hidden.add(line);
    document.querySelectorAll('main [data-line="' + line + '"]:not(button)').forEach(function (node) { node.hidden = !on; });
  }
  document.querySelectorAll(".key button").forEach(function (button) {
    if (button.getAttribute("aria-pressed") === "false") show(Number(button.dataset.line), false);
    button.addEventListener("click", function () {
      const line = Number(button.dataset.line), off = !hidden.has(line);
      show(line, !off);
      document.querySelectorAll('.key button[data-line="' + line + '"]').forEach(function (twin) {
        twin.setAttribute("aria-pressed", String(!off));
      });
      redraw();
    });
  });

  /* Print: everything drawn, on white */
  let before = null;
  window.addEventListener("beforeprint", function () {
    before = root.dataset.theme || "";
    root.dataset.theme = "light";
    document.querySelectorAll("details").forEach(function (d) { d.open = true; });
    Object.keys(specs).forEach(function (id) { /* half a sheet of paper, or most of it; the page's own width is no guide */
      const node = document.getElementById(id);
      draw(id, node && node.closest(".single") ? 460 : 330);
    });
  });
  window.addEventListener("afterprint", function () {
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    redraw();
  });

  if (document.getElementById("csv")) table();
  function table() {
    /* The table is read back from the download itself, so the two cannot differ. */
    const link = document.getElementById("csv");
    const text = decodeURIComponent(link.getAttribute("href").slice(link.getAttribute("href").indexOf(",") + 1));
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    function parse(source) {
      const rows = [];
      let row = [], cell = "", quoted = false;
      for (let i = 0; i < source.length; i++) {
        const c = source[i];
        if (quoted) {
          if (c !== '"') cell += c;
          else if (source[i + 1] === '"') { cell += c; i++; }
          else quoted = false;
        } else if (c === '"') quoted = true;
        else if (c === ",") { row.push(cell); cell = ""; }
        else if (c === "\n") { row.push(cell); rows.push(row); row = []; cell = ""; }
        else cell += c;
      }
      return rows;
    }
    const rows = parse(text), names = rows.shift();
    const numeric = new Set(["step", "layer", "value", "low", "high", "sd", "n", "contexts", "dropped", "seed"]);
    const always = new Set(["layer", "kind", "metric", "value", "low", "high"]);
    const shown = names.map(function (_, i) { return i; }).filter(function (i) {
      const seen = new Set(rows.map(function (r) { return r[i]; }));
      return always.has(names[i]) || seen.size > 1;
    });
    const same = names.filter(function (name, i) { return !shown.includes(i) && rows.length && rows[0][i] !== ""; });
    document.getElementById("same").textContent = same.length ? " The same in every row: " + same.map(function (name) {
      return name + " " + readable(rows[0][names.indexOf(name)], name);
    }).join(", ") + "." : "";
    const body = document.querySelector("#rows tbody"), head = document.querySelector("#rows thead");
    const state = { by: -1, down: false, all: false };
    function column(name) { return names.indexOf(name); }
    function readable(value, name) {
      if (!numeric.has(name) || value === "") return value || (name === "value" ? "–" : "");
      const x = Number(value);
      if (Number.isInteger(x)) return x.toLocaleString("en");
      const size = Math.abs(x);
      const shown = size >= 1e7 || size < 1e-4 ? x.toExponential(3) : size >= 1e4 ? Math.round(x).toLocaleString("en") : x.toPrecision(4);
      return shown.replace(/-/g, "−");
    }
    function wanted() {
      const metric = document.getElementById("by-metric").value, model = document.getElementById("by-model").value;
      const words = document.getElementById("by-text").value.toLowerCase().split(/\s+/).filter(Boolean);
      return rows.filter(function (r) {
        if (metric && r[column("metric")] !== metric) return false;
        if (model && r[column("model")] !== model) return false;
        const all = words.length ? r.join(" ").toLowerCase() : "";
        return words.every(function (w) { return all.includes(w); });
      });
    }
    function order(list) {
      if (state.by < 0) return list;
      const i = state.by, sign = state.down ? -1 : 1, byNumber = numeric.has(names[i]);
      return list.slice().sort(function (a, b) {
        if (a[i] === "" || b[i] === "") return (a[i] === "") - (b[i] === "");
        return sign * (byNumber ? Number(a[i]) - Number(b[i]) : a[i].localeCompare(b[i]));
      });
    }
    function fill() {
      const list = order(wanted()), most = state.all ? list.length : 40;
      body.textContent = "";
      list.slice(0, most).forEach(function (r) {
        const line = document.createElement("tr");
        shown.forEach(function (i) {
          const cell = document.createElement("td");
          cell.textContent = readable(r[i], names[i]);
          cell.className = numeric.has(names[i]) ? "num" : names[i] === "note" ? "prose" : "";
          line.appendChild(cell);
        });
        body.appendChild(line);
      });
      document.getElementById("count").textContent =
        "Showing " + Math.min(most, list.length).toLocaleString("en") + " of " + list.length.toLocaleString("en") + " rows.";
      document.getElementById("all").hidden = list.length <= most;
    }
    function headings() {
      const line = document.createElement("tr");
      shown.forEach(function (i) {
        const cell = document.createElement("th"), button = document.createElement("button");
        cell.scope = "col";
        cell.className = numeric.has(names[i]) ? "num" : "";
        button.type = "button";
        button.textContent = names[i];
        button.addEventListener("click", function () {
          state.down = state.by === i ? !state.down : false;
          state.by = i;
          head.querySelectorAll("th").forEach(function (th) { th.removeAttribute("aria-sort"); });
          cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
          fill();
        });
        cell.appendChild(button);
        line.appendChild(cell);
      });
      head.appendChild(line);
    }
    function choices(id, name) {
      const select = document.getElementById(id);
      const values = Array.from(new Set(rows.map(function (r) { return r[column(name)]; }))).sort();
      values.forEach(function (v) { select.appendChild(new Option(v, v)); });
      select.addEventListener("change", fill);
      if (values.length < 2) select.parentElement.hidden = true;
    }
    headings();
    choices("by-metric", "metric");
    choices("by-model", "model");
    document.getElementById("by-text").addEventListener("input", fill);
    document.getElementById("all").addEventListener("click", function () { state.all = true; fill(); });
    document.getElementById("table-filters").hidden = false;
    fill();
  }

  if (document.getElementById("concept-data")) concepts();
  function concepts() {
    /* Concept cards: every name becomes text, never markup. */
    const models = JSON.parse(document.getElementById("concept-data").textContent), cards = document.getElementById("cards");
    const model = document.getElementById("concept-model"), place = document.getElementById("concept-place"), step = document.getElementById("concept-step");
    function make(tag, className, text) {
      const node = document.createElement(tag);
      if (className) node.className = className;
      if (text !== undefined) node.textContent = text;
      return node;
    }
    function percent(share) { return share === null ? "–" : (100 * share).toPrecision(share < 0.01 ? 1 : share < 0.1 ? 2 : 3).replace(/\.0+$/, "") + " %"; }
    function fill(select, labels, values, at) {
      select.textContent = "";
      labels.forEach(function (label, i) { select.appendChild(new Option(label, values[i])); });
      select.selectedIndex = at;
      select.parentElement.hidden = labels.length < 2;
    }
    function current() { return models[Number(model.value)]; }
    function origin(from) {
      const line = make("p", "origin");
      if (!from) { line.textContent = "no concept before it"; return line; }
      const label = "concept " + (from[1] + 1) + " at step " + from[0].toLocaleString("en");
      line.append("from ");
      if (current().steps.includes(from[0])) {
        const button = make("button", "", label);
        button.type = "button";
        button.addEventListener("click", function () { step.value = String(from[0]); draw(from[1]); });
        line.append(button);
      } else line.append(label);
      if (from[2] !== null) line.append(", cosine " + from[2].toFixed(2));
      return line;
    }
    function card(concept) {
      const node = make("article", "card"), head = make("header"), tokens = make("ul", "tokens"), examples = make("ul", "examples");
      head.append(make("h4", "", "Concept " + (concept.concept + 1)), make("span", "", percent(concept.share) + " of the energy explained"));
      const most = Math.max.apply(null, concept.tokens.map(function (t) { return t[1] || 0; }).concat(1e-9));
      concept.tokens.forEach(function (token) {
        const item = make("li", "", token[0]);
        item.style.setProperty("--t", String((token[1] || 0) / most));
        item.append(make("small", "", percent(token[1])));
        tokens.append(item);
      });
      concept.examples.forEach(function (example) {
        const item = make("li");
        const before = make("span");
        before.append(make("span", "", example[0]));
        item.append(before, make("mark", "", example[1]), make("span", "", example[2]));
        item.title = example[0] + example[1] + example[2] + (example[3] === null ? "" : " (code " + example[3] + ")");
        examples.append(item);
      });
      node.append(head, origin(concept.from), tokens, examples);
      return node;
    }
    function draw(found) {
      const list = (current().cards[place.value + "|" + step.value] || []).slice();
      list.sort(function (a, b) { return (b.share || 0) - (a.share || 0); });
      cards.textContent = "";
      list.forEach(function (concept) {
        const node = card(concept);
        if (concept.concept === found) node.classList.add("found");
        cards.append(node);
      });
      if (!list.length) cards.append(make("p", "", "No concepts were kept for this layer and step."));
      const wanted = cards.querySelector(".found");
      if (wanted) wanted.scrollIntoView({ block: "nearest" });
    }
    function places() {
      const chosen = current(), kept = chosen.places.indexOf(place.selectedOptions[0] ? place.selectedOptions[0].textContent : "");
      fill(place, chosen.places, chosen.places.map(function (_, i) { return i; }), kept < 0 ? chosen.middle : kept);
      fill(step, chosen.steps.map(function (s) { return s.toLocaleString("en"); }), chosen.steps, chosen.steps.length - 1);
      draw();
    }
    fill(model, models.map(function (m) { return m.label; }), models.map(function (_, i) { return i; }), 0);
    model.addEventListener("change", places);
    [place, step].forEach(function (select) { select.addEventListener("change", function () { draw(); }); });
    document.getElementById("concept-filters").hidden = false;
    places();
  }
})();
