"""CopyText: the same thing written in several ways, one of them shown, with a button that copies it."""

import anywidget
import traitlets

__all__ = ["CopyText"]

_JS = """
function render({ model, el }) {
  const bar = document.createElement("div"), code = document.createElement("pre");
  bar.style.cssText = "display:flex;gap:4px;flex-wrap:wrap;align-items:center";
  code.style.cssText = "margin:4px 0;padding:8px 12px;font-size:12.5px;line-height:1.45;overflow-x:auto;" +
    "max-height:340px;border:1px solid var(--jp-border-color2,#bdbdbd);background:var(--jp-layout-color2,#f5f5f5);" +
    "color:var(--jp-content-font-color1,#1c2024)";
  code.tabIndex = 0;
  const said = document.createElement("span");
  said.setAttribute("role", "status");
  said.style.cssText = "font-size:13px;color:var(--jp-ui-font-color2,#5b6470)";
  const button = (text, act) => {
    const made = document.createElement("button");
    made.className = "jupyter-button lm-Widget";
    made.style.width = "auto";
    made.type = "button";
    made.textContent = text;
    made.onclick = act;
    bar.append(made);
    return made;
  };
  const draw = () => {
    const texts = model.get("texts"), chosen = model.get("chosen");
    bar.replaceChildren();
    for (const name of Object.keys(texts)) {
      const way = button(name, () => { model.set("chosen", name === chosen ? "" : name); model.save_changes(); });
      way.setAttribute("aria-pressed", String(name === chosen));
      if (name === chosen) way.classList.add("mod-active");
    }
    code.hidden = !(chosen in texts);
    code.textContent = texts[chosen] ?? "";
    code.setAttribute("aria-label", `this sweep as ${chosen}`);
    if (!code.hidden) button("Copy", copy).setAttribute("aria-label", `Copy the ${chosen} text`);
    said.textContent = "";
    bar.append(said);
  };
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      said.textContent = "copied";
    } catch {  // no permission, or no secure origin: the text is selected for the reader's own Ctrl+C
      getSelection().selectAllChildren(code);
      said.textContent = "selected: press Ctrl+C";
    }
  };
  model.on("change:texts", draw);
  model.on("change:chosen", draw);
  el.append(bar, code);
  draw();
  return () => { model.off("change:texts", draw); model.off("change:chosen", draw); };
}
export default { render };
"""


class CopyText(anywidget.AnyWidget):
    """Buttons, one a way of writing; the chosen one's text below, ready to be copied.

    Args:
        texts: Name of the way -> text, for instance {"Python": ..., "CLI": ..., "YAML": ...}.
        chosen: The way that is shown; "" for none.
    """

    _esm = _JS
    texts = traitlets.Dict().tag(sync=True)
    chosen = traitlets.Unicode().tag(sync=True)

    def __init__(self, texts: dict[str, str], *, chosen: str = ""):
        super().__init__(texts=texts, chosen=chosen)
        self.layout.width = "100%"
