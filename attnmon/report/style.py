"""The page's style sheet and its one script. In Python, so that the page needs no file beside it."""

from __future__ import annotations

from attnmon.report.maps import DIVERGING, SEQUENTIAL

__all__ = ["SCRIPT", "style"]

_LIGHT = """
--ground:#fff;--raised:#f6f6f4;--ink:#1d1f23;--soft:#5c6068;--line:#dcdcd8;--accent:#1f5fa6;
--alarm:#b8420f;--recovered:#b07d00;--calm:#dfe3e8;--nan:#c3c3c0;--nan-stroke:#77777a;--absent:#d8d8d4;
--watch:#6a6e76;--warn:#b07d00;--critical:#b8420f;--band:#1f5fa61c;color-scheme:light;
"""
_DARK = """
--ground:#15171b;--raised:#1d2026;--ink:#e7e8ea;--soft:#a0a5ae;--line:#343840;--accent:#7db4ee;
--alarm:#f08a52;--recovered:#e0b440;--calm:#343a43;--nan:#565a61;--nan-stroke:#a0a5ae;--absent:#3a3e46;
--watch:#a0a5ae;--warn:#e0b440;--critical:#f08a52;--band:#7db4ee24;color-scheme:dark;
"""

_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,"Segoe UI","Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 24px 64px;overflow-wrap:anywhere}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:20px;margin:44px 0 10px;padding-top:14px;border-top:2px solid var(--ink)}
h3{font-size:16px;margin:30px 0 8px}
h4{font-size:14px;margin:18px 0 6px;color:var(--soft);font-weight:600}
p{margin:6px 0}
a{color:var(--accent)}
code{font:12.5px/1.4 ui-monospace,"SF Mono",Menlo,Consolas,monospace;overflow-wrap:anywhere}
.soft{color:var(--soft)}
.small{font-size:13px}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:14px 0 0;font-size:14px}
.note{border-left:3px solid var(--recovered);background:var(--raised);padding:7px 12px;margin:8px 0;font-size:14px;overflow-wrap:anywhere}
.verdict{font-size:17px;margin:10px 0}
.verdict b.bad{color:var(--alarm)}.verdict b.back{color:var(--recovered)}
.tiles{display:flex;flex-wrap:wrap;gap:10px;margin:14px 0}
.tile{background:var(--raised);border-radius:8px;padding:9px 14px;min-width:118px}
.tile b{display:block;font-size:19px;line-height:1.3;font-variant-numeric:tabular-nums}
.tile span{font-size:12.5px;color:var(--soft)}
.columns{display:flex;flex-wrap:wrap;gap:16px 40px;align-items:flex-start}
.columns>*{min-width:0}
figure{margin:0}figure.narrow{max-width:330px}
figcaption{font-size:13px;color:var(--soft);margin-bottom:4px}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:3px 12px 3px 0;border-bottom:1px solid var(--line);white-space:nowrap;vertical-align:middle}
th{font-weight:600;color:var(--soft);font-size:12.5px}
th.l,td.l{text-align:left}
table.facts td:first-child{color:var(--soft);font-weight:600;white-space:nowrap;padding-right:20px}
table.facts th{padding-right:20px}
table.facts td{text-align:left;white-space:normal;vertical-align:top;overflow-wrap:anywhere}
td code{display:inline-block;max-width:34em;white-space:normal}td code[title]{min-width:20em}
td small{color:var(--soft)}
ul.plain{list-style:none;padding:0;margin:8px 0}ul.plain li{margin:3px 0}
details{margin:8px 0}
summary{cursor:pointer;padding:3px 0}
details.block{border:1px solid var(--line);border-radius:8px;padding:2px 14px;margin:10px 0}
p.block{border:1px solid var(--line);border-radius:8px;padding:8px 14px;margin:10px 0}
details.block>summary{padding:7px 0;font-weight:600}
details.block>summary .soft{font-weight:400}
.badge{display:inline-block;border-radius:4px;padding:0 7px;font-size:12px;line-height:19px;border:1px solid currentColor}
.badge.watch,.badge.watching{color:var(--watch)}.badge.warn,.badge.recovered{color:var(--warn)}
.badge.critical,.badge.alarm{color:var(--critical);font-weight:600}.badge.none{color:var(--soft);border-color:transparent;padding-left:0}
.rule{border:1px solid var(--line);border-radius:8px;padding:10px 16px;margin:12px 0}
.rule details{margin:3px 0}
.rule h4{margin:0 0 4px;color:var(--ink);font-size:15px}
.rule .badge{margin-right:6px;vertical-align:1px}
svg.map{display:block;max-width:100%;height:auto}
svg.curves{display:block;width:100%;max-width:760px;height:auto}
svg.spark{width:96px;height:20px;display:block}
svg.spark path{fill:none;stroke:var(--accent);stroke-width:1.4;stroke-linecap:round}
.tick{font-size:10px;fill:var(--soft);font-family:inherit}
.end{text-anchor:end}.mid{text-anchor:middle}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.line{fill:none;stroke-width:1.5;stroke:var(--accent);stroke-linecap:round;stroke-linejoin:round}
.line.under{stroke:var(--alarm);stroke-width:1.3;stroke-dasharray:1 3.2}
.line:hover{stroke-width:3}
.band{fill:var(--band)}
.limit{stroke:var(--alarm);stroke-width:1;stroke-dasharray:6 4}
.limit-name{fill:var(--alarm)}
.mark{fill:var(--watch)}.mark.warn{fill:var(--warn)}.mark.critical{fill:var(--critical)}
.nan{fill:var(--nan)}.stroke{stroke:var(--nan-stroke);stroke-width:1;fill:none}
.absent{fill:none;stroke:var(--absent);stroke-width:1;stroke-dasharray:1.5 1.5}
.calm{fill:var(--calm)}.alarm{fill:var(--alarm)}.watching{fill:var(--watch)}.recovered{fill:none;stroke:var(--recovered);stroke-width:2}
.bar{display:flex;flex-wrap:wrap;align-items:center;gap:4px 7px;font-size:12.5px;color:var(--soft);margin:6px 0 12px}
.bar svg{flex:none}
.key{margin-left:14px;display:inline-flex;gap:5px;align-items:center}
#label{position:fixed;pointer-events:none;background:var(--ink);color:var(--ground);font-size:12.5px;line-height:1.35;padding:4px 9px;border-radius:5px;max-width:320px;max-height:60vh;overflow:hidden;z-index:9;overflow-wrap:anywhere}
footer{margin-top:52px;padding-top:12px;border-top:1px solid var(--line);font-size:13px;color:var(--soft)}
@media(max-width:640px){main{padding:18px 14px 40px}h1{font-size:22px}.columns{gap:12px 20px}.tile{min-width:calc(50% - 5px)}.rule{padding:8px 12px}details.block{padding:2px 10px}}
@media print{main{max-width:none;padding:0}nav{display:none}.rule,figure,tr,.tile{break-inside:avoid}h2,h3,h4{break-after:avoid}details.block{border:0;padding:0}.scroll{overflow:visible}body{font-size:12px}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""  # noqa: E501

SCRIPT = """
'use strict';
const names = JSON.parse(document.getElementById('names').textContent);
const label = document.getElementById('label');
document.addEventListener('pointermove', event => {
  const map = event.target.closest ? event.target.closest('svg.map') : null;
  label.hidden = true;
  if (!map) return;
  const box = map.getBoundingClientRect();
  const [left, top, wide, tall] = map.dataset.g.split(',').map(Number);
  const zoom = map.viewBox.baseVal.width / box.width;
  const column = Math.floor(((event.clientX - box.left) * zoom - left) / wide);
  const row = Math.floor(((event.clientY - box.top) * zoom - top) / tall);
  const cells = (map.dataset.v.split(';')[row] || '').split(',');
  if (row < 0 || column < 0 || column >= cells.length || !map.dataset.v) return;
  const rows = names[map.dataset.s];
  const figure = cells[column] === 'x' ? 'no such head' : cells[column] === '' ? 'not measured'
    : cells[column] + (map.dataset.u ? ' ' + map.dataset.u : '');
  label.textContent = rows.names[row] + (rows.heads ? ', head ' + column : '') + ': ' + figure;
  label.hidden = false;
  label.style.left = Math.min(event.clientX + 14, innerWidth - label.offsetWidth - 8) + 'px';
  label.style.top = Math.min(event.clientY + 16, innerHeight - label.offsetHeight - 8) + 'px';
});
addEventListener('beforeprint', () => document.querySelectorAll('details').forEach(part => { part.open = true; }));
"""


def style() -> str:
    """The style sheet: dark where the reader's system is, light on paper."""
    depth = "".join(f".c{i}{{fill:{colour}}}.line.s{i}{{stroke:{colour}}}" for i, colour in enumerate(SEQUENTIAL))
    # On a dark ground the darkest curves would be lost.
    lifted = "".join(
        f".line.s{i}{{stroke:color-mix(in srgb,{colour} {50 + 50 * i // len(SEQUENTIAL)}%,#9db4ff)}}"
        for i, colour in enumerate(SEQUENTIAL)
    )
    sides = {
        name: "".join(f".d{i}{{fill:{colour}}}" for i, colour in enumerate(colours))
        for name, colours in DIVERGING.items()
    }
    return (
        f":root{{{_LIGHT}}}{_RULES}{depth}{sides['light']}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}{sides['dark']}{lifted}}}"
    ).replace("\n", "")
