// Formulas of TeX's common subset, as MathML.

import {el} from "./api.js";

const MAX_LENGTH = 4000, MAX_DEPTH = 24;

const table = text => new Map(text.trim().split(/\s+/).map(pair => [pair.slice(0, pair.indexOf("=", 1)), pair.slice(pair.indexOf("=", 1) + 1)]));
const set = text => new Set(text.trim().split(/\s+/));
const LETTERS = table(`infty=∞ ell=ℓ hbar=ℏ partial=∂ nabla=∇ emptyset=∅ Re=ℜ Im=ℑ angle=∠ varepsilon=ε vartheta=ϑ phi=ϕ
  dots=… ldots=… cdots=⋯ vdots=⋮ ddots=⋱`);
`alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho varsigma sigma tau upsilon varphi
  chi psi omega`.split(/\s+/).forEach((name, i) => {
  LETTERS.set(name, String.fromCharCode(0x3b1 + i)).set(name.replace("var", "").replace(/^./, first => first.toUpperCase()), String.fromCharCode(0x391 + i));
});
const OPERATORS = table(`cdot=⋅ times=× div=÷ pm=± mp=∓ le=≤ leq=≤ ge=≥ geq=≥ ne=≠ neq=≠ ll=≪ gg=≫ approx=≈ equiv=≡ sim=∼
  simeq=≃ cong=≅ propto=∝ in=∈ notin=∉ subset=⊂ subseteq=⊆ supset=⊃ supseteq=⊇ cup=∪ cap=∩ setminus=∖ forall=∀ exists=∃
  neg=¬ lnot=¬ land=∧ wedge=∧ lor=∨ vee=∨ oplus=⊕ otimes=⊗ circ=∘ ast=∗ star=⋆ to=→ rightarrow=→ leftarrow=← Rightarrow=⇒
  implies=⇒ Leftarrow=⇐ leftrightarrow=↔ Leftrightarrow=⇔ iff=⇔ mapsto=↦ mid=∣ parallel=∥ perp=⊥ langle=⟨ rangle=⟩
  lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ vert=| Vert=‖ prime=′ {={ }=} %=% $=$ #=# &=& _=_ |=‖`);
const LARGE = table("sum=∑ prod=∏ int=∫ iint=∬ oint=∮ bigcup=⋃ bigcap=⋂");
const FUNCTIONS = set("sin cos tan cot arcsin arccos arctan sinh cosh tanh log ln exp det dim ker deg gcd arg Pr");
const LIMITS = set("lim max min sup inf argmax argmin");
const TEXTS = set("text mathrm textbf textit mathtt operatorname");
const PLAIN = set("mathcal mathit boxed mathbf boldsymbol bm");
const ACCENTS = table("hat=^ widehat=^ bar=¯ overline=¯ tilde=~ vec=→ dot=˙ ddot=¨ underline=_");
const SPACES = table(",=.17em :=.22em ;=.28em !=0em quad=1em qquad=2em");
const BOARD = table("R=ℝ N=ℕ Z=ℤ Q=ℚ C=ℂ E=𝔼 P=ℙ");
const FENCES = table("matrix= pmatrix=() bmatrix=[] vmatrix=|| cases={ aligned= align= align*=");

const m = (name, ...children) => el(`math:${name}`, {}, children);
const sign = (text, stretchy = false) => el("math:mo", {stretchy: String(stretchy)}, text);
const withLimits = node => Object.assign(node, {limits: true});
const fail = what => { throw new Error(what); };

/** Return a formula as MathML; as source text if a part of it is unknown. */
export function formula(source, display) {
  try {
    return parse(source.length > MAX_LENGTH ? fail("too long") : source, display);
  } catch {
    return el("code", {}, source);
  }
}

function parse(source, display) {
  const tokens = source.match(/\\[a-zA-Z]+\*?|\\.|\d+(?:\.\d+)?|\s+|[^]/gu) ?? [];
  let at = 0, depth = 0;
  const skip = () => { while (/^\s/.test(tokens[at] ?? "")) at++; };
  const next = () => {
    const token = tokens[at++] ?? fail("early end");
    skip();
    return token;
  };
  const expect = token => next() === token || fail(`no ${token}`);

  /** Return a row of atoms with their scripts, up to a token that ends it. */
  function row(...ends) {
    if (++depth > MAX_DEPTH) fail("too deep");
    const parts = [];
    while (at < tokens.length && tokens[at] !== "}" && !ends.includes(tokens[at])) parts.push(scripts(atom()));
    depth--;
    return m("mrow", parts);
  }

  function scripts(base) {
    let below, above;
    for (;;) {
      if (tokens[at] === "_" && !below) { next(); below = argument(); }
      else if (tokens[at] === "^" && !above) { next(); above = argument(); }
      else if (tokens[at] === "'" && !above) {
        let primes = "";
        for (; tokens[at] === "'"; next()) primes += "′";
        above = m("mo", primes);
      } else break;
    }
    const [sub, sup] = base.limits && display ? ["munder", "mover"] : ["msub", "msup"];
    if (below && above) return m(sub + (sub === "msub" ? "sup" : "over"), base, below, above);
    return below ? m(sub, base, below) : above ? m(sup, base, above) : base;
  }

  function argument() {
    if (/^\d./.test(tokens[at] ?? "")) tokens.splice(at, 1, ...tokens[at]);  // as in \frac12
    if (tokens[at] !== "{") return atom();
    next();
    const inner = row();
    expect("}");
    return inner;
  }

  /** Return the text of a group without formulas. */
  function text() {
    let words = "";
    if (tokens[at] !== "{") fail("no {");
    for (at++; tokens[at] !== "}"; at++) words += tokens[at] === "{" ? fail("{ here") : (tokens[at] ?? fail("no }")).replace(/^\\/, "");
    next();
    return words;
  }

  function atom() {
    const token = next();
    if (token === "{") { at--; return argument(); }
    if (token[0] === "\\") return command(token.slice(1));
    if (/^\d/.test(token)) return m("mn", token);
    if (/^\p{L}$/u.test(token)) return m("mi", token);
    return /[\^_&]/.test(token) ? fail(`${token} here`) : sign({"-": "−", "*": "∗", "~": " "}[token] ?? token);
  }

  function command(name) {
    if (LETTERS.has(name)) return m("mi", LETTERS.get(name));
    if (OPERATORS.has(name)) return sign(OPERATORS.get(name));
    if (SPACES.has(name) || name === " ") return el("math:mspace", {width: SPACES.get(name) ?? ".3em"});
    if (LARGE.has(name)) return name.endsWith("int") ? m("mo", LARGE.get(name)) : withLimits(m("mo", LARGE.get(name)));
    if (FUNCTIONS.has(name)) return m("mi", name);
    if (LIMITS.has(name)) return withLimits(m("mo", name));
    if (TEXTS.has(name)) return m("mtext", text());
    if (PLAIN.has(name)) return /^b|bf$/.test(name) && name !== "boxed" ? el("math:mrow", {class: "bold"}, argument()) : argument();
    if (ACCENTS.has(name)) return el(name === "underline" ? "math:munder" : "math:mover", {accent: "true"}, argument(), sign(ACCENTS.get(name), /e$/.test(name)));
    if (/^[dtc]?frac$/.test(name)) return m("mfrac", argument(), argument());
    if (/^[bB]ig[lr]?$/.test(name)) return fence();
    switch (name) {
      case "binom": return m("mrow", sign("(", true), el("math:mfrac", {linethickness: "0"}, argument(), argument()), sign(")", true));
      case "sqrt": return root();
      case "mathbb": { const letter = text(); return m("mi", BOARD.get(letter) ?? letter); }
      case "displaystyle": return m("mrow");
      case "left": {
        const parts = [fence(), row("\\right")];
        expect("\\right");
        return m("mrow", parts, fence());
      }
      case "begin": return matrix();
      default: return fail(`\\${name} is unknown`);
    }
  }

  function root() {
    if (tokens[at] !== "[") return m("msqrt", argument());
    next();
    const index = row("]");
    expect("]");
    return m("mroot", argument(), index);
  }

  /** Return a bracket that is as high as its content. */
  function fence() {
    const token = next();
    return sign(token === "." ? "" : token[0] === "\\" ? OPERATORS.get(token.slice(1)) ?? fail("no bracket") : token, true);
  }

  function matrix() {
    const name = text(), rows = [[]], [left, right] = FENCES.get(name) ?? fail(`${name} is unknown`);
    for (let token; token !== "\\end";) {
      rows.at(-1).push(m("mtd", row("&", "\\\\", "\\end")));
      token = next();
      if (token === "\\\\") rows.push([]);
      else if (token === "}") fail("} here");
    }
    if (text() !== name) fail("another \\end");
    const body = el("math:mtable", {class: /^(cases|align)/.test(name) ? "left" : null}, rows.map(cells => m("mtr", cells)));
    return m("mrow", left && sign(left, true), body, right && sign(right, true));
  }

  skip();
  const whole = row();
  return at < tokens.length ? fail("a bracket too many") : el("math:math", {display: display ? "block" : "inline"}, whole);
}
