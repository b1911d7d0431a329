"""The look of the page: one sheet, system fonts, light and dark by the reader's own setting, and print."""

_LIGHT = """
--bg:#f6f6f4;--card:#ffffff;--ink:#17191f;--ink-2:#565b66;--line:#e3e3df;--grid:#ecece8;--axis:#c6c7c3;--wash:#f1f1ee;
--accent:#2f55c8;--accent-wash:#eaeffb;--good:#14713f;--warn:#8a5a00;--bad:#b3261e;
--good-wash:#e8f4ec;--warn-wash:#fbf2dd;--bad-wash:#fcebe9;--good-fill:#3a9c68;--bad-fill:#d3574c;--total-fill:#454b59;
--c1:#3f68d6;--c2:#e3a32b;--c3:#d9604d;--c4:#43a594;--c5:#8a63c7;--c6:#7d9a3a;--c7:#c96c9d;--c8:#5aa3d8;--c9:#946a4e;--c10:#9096a3;
"""
_DARK = """
--bg:#111317;--card:#191c22;--ink:#eceef2;--ink-2:#a3a9b6;--line:#2b2f38;--grid:#262a32;--axis:#484e5b;--wash:#20242b;
--accent:#93adff;--accent-wash:#1f2946;--good:#62cf96;--warn:#e5b95a;--bad:#ff9389;
--good-wash:#17301f;--warn-wash:#35290f;--bad-wash:#3a1b19;--good-fill:#4bb37e;--bad-fill:#e2695e;--total-fill:#b4bac7;
--c1:#7094f2;--c2:#ecb54d;--c3:#ec7f6d;--c4:#5cc2b0;--c5:#ab89e6;--c6:#a0be5a;--c7:#e291bd;--c8:#7fbfec;--c9:#bd9176;--c10:#8d94a3;
"""

_BASE = """
*,*::before,*::after{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;color-scheme:light dark;scroll-behavior:smooth}
html[data-scheme=light]{color-scheme:light}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.6 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",
  "Noto Sans","PingFang SC","Microsoft YaHei",sans-serif;font-variant-numeric:tabular-nums;text-rendering:optimizeLegibility;
  overflow-wrap:break-word}
main,header.page,footer.page{max-width:1080px;margin:0 auto;padding:0 clamp(16px,4vw,40px)}
header.page{padding-top:clamp(28px,6vw,72px);padding-bottom:8px}
.brand{display:flex;align-items:center;gap:9px;font-size:13px;font-weight:600;letter-spacing:.02em;
  color:var(--ink-2);margin:0 0 22px}
.brand svg{display:block;color:var(--accent)}
h1{font-size:clamp(28px,4.6vw,46px);line-height:1.12;letter-spacing:-.022em;font-weight:680;margin:0;text-wrap:balance}
.subtitle{font-size:clamp(16px,1.7vw,19px);line-height:1.5;color:var(--ink-2);margin:14px 0 0;max-width:68ch;text-wrap:pretty}
nav.toc{display:flex;flex-wrap:wrap;gap:6px 20px;margin:26px 0 0;padding:14px 0 0;
  border-top:1px solid var(--line);font-size:14px}
nav.toc a{color:var(--ink-2);text-decoration:none;padding:2px 0;border-bottom:1px solid transparent}
nav.toc a:hover,nav.toc a:focus-visible{color:var(--accent);border-color:currentColor}
section{margin-top:clamp(40px,6vw,64px);scroll-margin-top:16px}
section.lead{margin-top:28px}
h2{font-size:clamp(20px,2.4vw,25px);line-height:1.25;letter-spacing:-.012em;font-weight:650;margin:0 0 16px}
h3{font-size:16px;font-weight:650;margin:30px 0 10px}
p{margin:0 0 18px;max-width:72ch;text-wrap:pretty;white-space:pre-line}
p.quiet{color:var(--ink-2)}p.good,p.warn,p.bad{padding:11px 16px;border-radius:10px;max-width:none}
p.good{background:var(--good-wash);color:var(--good)}p.warn{background:var(--warn-wash);color:var(--warn)}
p.bad{background:var(--bad-wash);color:var(--bad)}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px;border-radius:4px}
footer.page{margin-top:72px;padding-top:18px;padding-bottom:40px;color:var(--ink-2);font-size:13px}
"""

_BLOCKS = """
.card{background:var(--card);border:1px solid var(--line);border-radius:14px;margin:0 0 18px;min-width:0}
figure.card{padding:18px clamp(12px,2.2vw,22px) 14px}
figcaption,.cap{font-size:15px;font-weight:620;line-height:1.4;margin:0 0 4px}
.note{font-size:13.5px;line-height:1.5;color:var(--ink-2);margin:8px 0 0;max-width:82ch}
dl.stats{display:grid;grid-template-columns:repeat(var(--n,4),minmax(0,1fr));margin:0 0 18px;padding:0;background:var(--card);
  border:1px solid var(--line);border-radius:14px;overflow:hidden}
dl.stats>div{padding:18px 20px 17px;display:flex;flex-direction:column;min-width:0;box-shadow:0 0 0 .5px var(--line)}
dl.stats .good{color:var(--good)}dl.stats .warn{color:var(--warn)}dl.stats .bad{color:var(--bad)}
dl.stats dt{font-size:13px;color:var(--ink-2);line-height:1.4}
dl.stats dd{margin:0}
dl.stats dd.value{font-size:clamp(23px,2.6vw,29px);font-weight:640;letter-spacing:-.018em;line-height:1.25;margin-top:4px}
dl.stats dd.detail{font-size:13px;color:var(--ink-2);line-height:1.45;margin-top:4px}
ul.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;margin:8px 0 4px;padding:0;font-size:13px;color:var(--ink-2)}
ul.legend li{display:flex;align-items:center;gap:7px}
ul.legend i{width:11px;height:11px;border-radius:3px;flex:none}
.plot{width:100%;min-height:120px;overflow:hidden}
.plot .nojs{color:var(--ink-2);font-size:14px;padding:12px 0;max-width:none}
details{margin-top:8px;font-size:13.5px}
summary{cursor:pointer;color:var(--ink-2);width:fit-content;padding:3px 0}
summary:hover{color:var(--accent)}
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch;max-width:100%}
.scroll:focus-visible{outline-offset:-2px}
.table .cap,.matrix .cap{padding:16px 20px 6px;margin:0}
.table .note,.matrix .note{padding:0 20px 14px;margin:10px 0 0}
table{border-collapse:collapse;width:100%;font-size:14.5px;line-height:1.45}
th,td{padding:9px 14px;text-align:left;vertical-align:top;border-top:1px solid var(--line)}
thead th{font-size:12.5px;font-weight:600;color:var(--ink-2);white-space:nowrap;border-top:0;vertical-align:bottom}
th:first-child,td:first-child{padding-left:20px}th:last-child,td:last-child{padding-right:20px}
tbody th{font-weight:560}
td.r,th.r{text-align:right;white-space:nowrap}
td.long{min-width:19ch}td.short,th.short{white-space:nowrap}
tr.good>:first-child{box-shadow:inset 3px 0 var(--good-fill)}tr.bad>:first-child{box-shadow:inset 3px 0 var(--bad-fill)}
tr.warn>:first-child{box-shadow:inset 3px 0 var(--c2)}
tr.good{background:color-mix(in srgb,var(--good-wash) 55%,transparent)}
tr.bad{background:color-mix(in srgb,var(--bad-wash) 55%,transparent)}
tr.quiet td,tr.quiet th{color:var(--ink-2)}
.narrow,.matrix{width:fit-content;min-width:min(100%,600px);max-width:100%}.narrow .note,.matrix .note{width:0;min-width:100%}
details table{font-size:13px;width:auto}details th,details td{padding:4px 12px}
.matrix table{width:auto}
.matrix td{text-align:center;min-width:58px;border:2px solid var(--card);border-radius:6px;padding:8px 6px;
  background:color-mix(in srgb,var(--c1) calc(var(--v)*52%),var(--wash))}
.matrix th{border-top:0;white-space:nowrap}.matrix tbody th{position:sticky;left:0;background:var(--card);padding-right:14px}
.matrix td.none{background:transparent;color:var(--ink-2)}
.code{overflow:hidden}
.code .bar{display:flex;justify-content:space-between;align-items:center;gap:12px;padding:9px 10px 9px 20px;
  border-bottom:1px solid var(--line);font-size:13px;color:var(--ink-2)}
.code pre{margin:0;padding:15px 20px;overflow-x:auto;font:13.5px/1.6 ui-monospace,SFMono-Regular,Menlo,Consolas,
  "Liberation Mono",monospace;tab-size:4;max-height:620px}
.code button{font:inherit;font-weight:560;color:var(--ink);background:var(--wash);border:1px solid var(--line);
  border-radius:8px;padding:4px 12px;cursor:pointer;min-width:70px;min-height:32px}
.code button:hover{border-color:var(--accent);color:var(--accent)}
.tomltable{color:var(--accent);font-weight:600}.comment{color:var(--ink-2)}
@media (max-width:820px){
 dl.stats{grid-template-columns:repeat(2,minmax(0,1fr))}dl.stats>div:last-child:nth-child(odd){grid-column:1/-1}
}
@media (max-width:560px){
 body{font-size:15.5px}th,td{padding:8px 10px}th:first-child,td:first-child{padding-left:14px}
 .table .cap,.matrix .cap{padding:14px 14px 4px}.table .note,.matrix .note{padding:0 14px 12px}
 dl.stats>div{padding:14px 15px}
 .code pre{padding:13px 14px}.code .bar{padding-left:14px}td.long{min-width:22ch}.table tbody th.short{white-space:normal}
 figure.card{padding:14px 12px 12px}
}
@media print{
 body{background:#fff;font-size:11pt}main,header.page,footer.page{max-width:none;padding-left:0;padding-right:0}
 nav.toc,.code button,summary{display:none}.card,dl.stats,tr{break-inside:avoid}h2,h3{break-after:avoid}
 .code pre{max-height:none;white-space:pre-wrap}.scroll{overflow:visible}section{margin-top:28px}
}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
"""

STYLE = (
    f":root{{{_LIGHT}}}\n@media (prefers-color-scheme:dark){{:root:not([data-scheme=light]){{{_DARK}}}}}\n"
    f"@media print{{:root{{{_LIGHT}}}}}\n{_BASE}{_BLOCKS}"
).replace("\n\n", "\n")
"""The style sheet; names no file and no address."""
