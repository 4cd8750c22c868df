"""The report's page: a Jinja template with its style and script inline. It asks nothing of any server.

Plotly's script stands in the page once; each figure is a block of JSON, drawn with the template of the reader's colour
scheme and drawn again when that changes. A content security policy forbids every request, so that a forgotten one
fails where it is seen.
"""

__all__ = ["PAGE"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --quiet: #5b6470; --page: #f3f4f6; --card: #ffffff; --line: #e1e4e8;
  --accent: #0072B2; --mark: #ffe3b3; --ok: #00704f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --quiet: #9aa4b2; --page: #0f1116; --card: #171a21;
  --line: #323844; --accent: #6cc1f2; --mark: #6b4a00; --ok: #4fd1a5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1056px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 20px; margin: 44px 0 12px; }
h3 { font-size: 16px; margin: 24px 0 8px; }
p { margin: 0 0 12px; max-width: 78ch; }
.quiet { color: var(--quiet); font-size: 14px; }
.badge { display: inline-block; border: 1px solid var(--accent); color: var(--accent); border-radius: 999px;
  padding: 0 10px; font-size: 13px; font-weight: 600; vertical-align: 3px; margin-left: 8px; }
.headline { font-size: 20px; line-height: 1.45; margin: 20px 0; max-width: 70ch; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 0 0 20px; }
.card { flex: 1 1 200px; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px; }
.card b { display: block; font-size: 28px; line-height: 1.2; }
.card span { display: block; font-size: 14px; color: var(--quiet); }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; margin: 16px 0 0; }
a { color: var(--accent); }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  margin: 0 0 16px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
caption { text-align: left; font-weight: 600; padding: 12px 14px 4px; }
th, td { padding: 6px 9px; text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th { color: var(--quiet); font-weight: 600; vertical-align: bottom; white-space: normal; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
tbody tr { border-top: 1px solid var(--line); }
tbody tr.new-phase { border-top: 3px double var(--line); }
figure { margin: 0 0 20px; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  overflow-x: auto; padding: 8px 12px 14px; }
figcaption { font-size: 14px; color: var(--quiet); padding: 4px 8px 0; max-width: 84ch; }
.plot { width: 100%; min-width: 760px; }
ul.notes { padding-left: 20px; max-width: 82ch; } ul.notes li { margin-bottom: 8px; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin-bottom: 8px; }
summary { cursor: pointer; padding: 8px 14px; font-size: 14px; }
summary .same { color: var(--ok); } summary .differ { font-weight: 600; }
.answers { display: flex; flex-wrap: wrap; gap: 0 20px; padding: 0 14px 12px; }
.answer { flex: 1 1 300px; font-size: 14px; }
.answer .who { color: var(--quiet); font-weight: 600; margin: 6px 0 2px; }
.answer .said { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line);
  padding-left: 10px; }
mark { background: var(--mark); color: inherit; border-radius: 3px; box-shadow: 0 0 0 2px var(--mark);
  text-decoration: underline; text-decoration-thickness: 1px; text-underline-offset: 3px; }
table.settings td { white-space: pre-line; overflow-wrap: anywhere; text-align: left; vertical-align: top; }
table.settings th { text-align: left; width: 220px; vertical-align: top; }
code { font-size: 13px; }
@media print { details { break-inside: avoid; } figure { break-inside: avoid; } nav { display: none; } }
"""

_SCRIPT = """
const templates = JSON.parse(document.getElementById("templates").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const config = {responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", scrollZoom: false,
                modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]};
function draw() {
  const template = templates[dark.matches ? "dark" : "light"];
  for (const block of document.querySelectorAll("script.figure")) {
    const figure = JSON.parse(block.textContent);
    Plotly.react(block.dataset.plot, figure.data, {...figure.layout, template}, config);
  }
}
dark.addEventListener("change", draw);
draw();
"""

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

PAGE = (
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content=\""""
    + _POLICY
    + """\">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}: {{ run_id }}</title>
<style>"""
    + _STYLE
    + """</style>
<script>{{ plotly_script }}</script>
</head>
<body><main>
<h1>{{ title }} <span class="badge">measured</span></h1>
<p class="quiet">Run {{ run_id }}{% if time %}, {{ time }}{% endif %}</p>
<p id="what">{{ what }}</p>
<p class="headline" id="headline">{{ headline }}</p>
{% if cards %}<p class="quiet">Median time to first token when a document is asked about again:</p>
<div class="cards">
{% for card in cards %}<div class="card"><span>{{ card.name }}</span><b>{{ card.value }}</b>
<span>{{ card.note }}</span></div>
{% endfor %}</div>{% endif %}
<nav><a href="#table">Table</a><a href="#figures">Figures</a><a href="#method">How it was measured</a>
<a href="#answers">Answers side by side</a><a href="#environment">Environment</a></nav>

<h2 id="table">Table</h2>
{% for sheet in sheets %}<div class="scroll"><table><caption>{{ sheet.title }}</caption>
<thead><tr>{% for name in sheet.header %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in sheet.rows %}
<tr{% if not loop.first and row[1] != loop.previtem[1] %} class="new-phase"{% endif %}>
{%- for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table></div>
{% endfor %}
<p class="quiet">{{ table_note }}</p>

<h2 id="figures">Figures</h2>
<noscript><p>The figures need JavaScript, which is part of this file; report.png shows the main ones.</p></noscript>
{% for figure in figures %}<figure>
<div class="plot" id="plot-{{ figure.name }}" role="img" aria-label="{{ figure.alt }}"
 style="height:{{ figure.height }}px"></div><figcaption>{{ figure.caption }}</figcaption></figure>
<script type="application/json" class="figure" data-plot="plot-{{ figure.name }}">{{ figure.json }}</script>
{% endfor %}
<h2 id="method">How it was measured, and what to bear in mind</h2>
<ul class="notes">{% for note in notes %}<li>{{ note }}</li>
{% endfor %}</ul>

<h2 id="answers">Answers side by side</h2>
<p>{{ answers_note }}</p>
{% for question in questions %}<details{% if question.differs %} open{% endif %}><summary>
<code>{{ question.name }}</code> {{ question.text }}
<span class="{{ 'differ' if question.differs else 'same' }}">{{ question.verdict }}</span></summary>
<div class="answers">{% for answer in question.answers %}<div class="answer"><div class="who">{{ answer.who }}</div>
<div class="said">
{%- for part in answer.parts %}{% if part.marked %}<mark>{{ part.text }}</mark>{% else %}{{ part.text }}{% endif %}
{%- endfor %}</div></div>
{% endfor %}</div></details>
{% endfor %}
<h2 id="environment">Environment</h2>
{% for name, rows in environment %}<div class="scroll"><table class="settings"><caption>{{ name }}</caption><tbody>
{% for key, value in rows %}<tr><th scope="row">{{ key }}</th><td>{{ value }}</td></tr>
{% endfor %}</tbody></table></div>
{% endfor %}
{% if picture_note %}<p class="quiet">{{ picture_note }}</p>{% endif %}
</main>
<script type="application/json" id="templates">{{ templates }}</script>
<script>"""
    + _SCRIPT
    + """</script>
</body></html>
"""
)
