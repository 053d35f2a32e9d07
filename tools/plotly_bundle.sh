#!/usr/bin/env bash
# Build the drawing library of the pages again: plotly.js with the two kinds of traces that pages draw.
#     tools/plotly_bundle.sh 4.1.1        needs npm and its registry
set -euo pipefail
version=$1
target="$(cd "$(dirname "$0")/.." && pwd)/src/anisoscope/view/templates/plotly/plotly-pages.min.js.gz"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
npm init -y > /dev/null
npm install --silent --no-audit --no-fund --ignore-scripts "plotly.js@$version" esbuild@0.28.2
cat > entry.js << 'END'
const Plotly = require("plotly.js/lib/core");  // which has scatter
Plotly.register([require("plotly.js/lib/heatmap")]);
module.exports = Plotly;
END
banner="/* plotly.js (scatter, heatmap - minified) v$version
 * Copyright 2012-2026, Plotly, Inc.
 * All rights reserved.
 * Licensed under the MIT license
 */"
node_modules/.bin/esbuild entry.js --bundle --minify --format=iife --global-name=Plotly --target=es2016 \
  --define:global=window --define:define.amd=false --alias:stream=stream-browserify --loader:.css=empty \
  --legal-comments=inline --banner:js="$banner" --log-level=warning --outfile=out.js
gzip -9 -n -c out.js > "$target"
sha256sum out.js
