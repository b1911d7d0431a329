"""What a block consists of: regions (attention, MLP, experts) with the products inside, and how each weight may be cut.

A region is a child of a block that holds products. Products are known by their names, as the families of transformers use
them, and where a name says nothing by their shapes; the user can name them too. The module is only looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fullstride.engine.anatomy_region import (
    FUSED,
    HEADS,
    KEY_HEADS,
    KEY_NAMES,
    NAMES,
    QUERY_NAMES,
    Part,
    Region,
    Role,
    Slicing,
    is_product,
    is_transposed,
    widths,
)
from fullstride.errors import BadInput, RuleBroken


def regions(
    model: nn.Module,
    block: str,
    hidden: int,
    tp: int,
    named: Mapping[str, Role] | None = None,
    item_bytes: int = 4,
    fused: Mapping[str, str] = FUSED,
) -> list[Region]:
    """The regions of a block, cut over `tp` ranks.

    Args:
        model: any weights, also on meta.
        block: its path.
        hidden: width of the residual stream.
        tp: degree.
        named: the user's roles by the end of a product's path.
        item_bytes: of an element of the weights that compute.
        fused: how products that join queries, keys and values arrange them, by name.

    Raises:
        BadInput: products that cannot be placed; says which names were looked at.
        RuleBroken: heads or widths that do not come out even over the ranks.
    """
    root, found = model.get_submodule(block), []
    if any(is_product(child) for child in root.children()):
        seen = ", ".join(f"{n} ({type(m).__name__})" for n, m in root.named_children())
        raise BadInput(
            f"layout.tp = {tp}: {block} holds products itself, and tensor parallelism looks for attention and MLP as modules "
            f"of their own (looked at {seen})",
            fix="put attention and MLP into modules of their own, or use layout.tp = 1",
        )
    for name, child in root.named_children():
        path = f"{block}.{name}"
        if any(is_product(m) or _stacked(m) for m in child.modules()):
            found.append(_Reader(model, child, path, hidden, tp, named or {}, item_bytes, fused).read())
        else:
            _only_norms(child, path, tp)
    if not found:
        seen = ", ".join(f"{n} ({type(m).__name__})" for n, m in root.named_children()) or "nothing"
        raise BadInput(f"layout.tp = {tp}: no products in {block} (looked at {seen})", fix="use nn.Linear, or layout.tp = 1")
    return found


def _stacked(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Weights of many experts in one tensor [experts, out, in]."""
    return {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False) if p.ndim == 3}


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _only_norms(child: nn.Module, path: str, tp: int) -> None:
    for name, module in child.named_modules():
        if not _is_norm(module) and any(True for _ in module.parameters(recurse=False)):
            where = f"{path}.{name}" if name else path
            raise BadInput(
                f"layout.tp = {tp}: {where} ({type(module).__name__}) has weights and is neither product nor norm",
                fix="use layout.tp = 1",
            )


class _Reader:
    """Reads one region."""

    def __init__(
        self,
        model: nn.Module,
        root: nn.Module,
        path: str,
        hidden: int,
        tp: int,
        named: Mapping[str, Role],
        item_bytes: int,
        fused: Mapping[str, str],
    ) -> None:
        self._model, self._root, self._path, self._hidden, self._tp, self._named = model, root, path, hidden, tp, named
        self._item_bytes, self._fused = item_bytes, fused
        self._products = {n: m for n, m in root.named_modules() if n and is_product(m)}
        self._region = Region(path=path)

    def read(self) -> Region:
        roles = {name: self._role(name) for name in self._products}
        self._guess(roles)
        if self._attends():
            self._attention(roles)
        else:
            for holder in dict.fromkeys(name.rpartition(".")[0] for name in roles):
                inside = {n: r for n, r in roles.items() if n.rpartition(".")[0] == holder}
                self._mlp(inside, holder)
        self._experts()
        self._rest(roles)
        return self._region

    def _role(self, name: str) -> Role | None:
        full = f"{self._path}.{name}"
        for end, role in self._named.items():
            if full.endswith(f".{end}"):
                return role
        return NAMES.get(name.rpartition(".")[2])

    def _guess(self, roles: dict[str, Role | None]) -> None:
        """Unknown names by shape: the last product back to the residual width is the row, those before it are columns."""
        for holder in dict.fromkeys(name.rpartition(".")[0] for name in roles):
            names = [n for n in roles if n.rpartition(".")[0] == holder]
            unknown = [n for n in names if roles[n] is None]
            if not unknown:
                continue
            row, before = names[-1], names[:-1]
            fits = widths(self._products[row])[1] == self._hidden and roles[row] in (None, "row")
            if not fits or not before or any(widths(self._products[n])[0] != self._hidden for n in before):
                seen = ", ".join(f"{n} {widths(self._products[n])}" for n in names)
                raise BadInput(
                    f"layout.tp = {self._tp}: what {', '.join(unknown)} in {self._path} is for is not known by name or shape "
                    f"(looked at {seen}, as inputs and outputs; the residual stream is {self._hidden} wide)",
                    fix="name each in layout.parts as column, row or whole, or use layout.tp = 1",
                )
            roles[row] = "row"
            for n in before:
                roles[n] = roles[n] or "column"

    def _attends(self) -> bool:
        last = {name.rpartition(".")[2] for name in self._products}
        by_name = bool(last & (QUERY_NAMES | KEY_NAMES))
        return by_name or "att" in type(self._root).__name__.lower()

    # Attention.

    def _heads(self) -> int:
        for owner in (self._root, getattr(self._root, "config", None)):
            for name in HEADS:
                value = getattr(owner, name, None)
                if isinstance(value, int) and value > 0:
                    return value
        raise BadInput(
            f"layout.tp = {self._tp}: {self._path} ({type(self._root).__name__}) does not say how many heads it has "
            f"(looked for {', '.join(HEADS)})",
            fix="keep the number of heads in an attribute num_heads, or use layout.tp = 1",
        )

    def _attention(self, roles: dict[str, Role | None]) -> None:
        tp, heads = self._tp, self._heads()
        if heads % tp:
            raise RuleBroken(
                f"layout.tp = {tp}, {self._path} has {heads} heads: tensor parallelism gives each rank whole attention heads",
                fix="use a tp that divides the heads",
            )
        rows = [n for n, r in roles.items() if r == "row"]
        width = widths(self._products[rows[0]])[0] if len(rows) == 1 else 0
        if not width or width % heads:
            raise self._unplaced(roles)
        key_heads = self._key_heads(width // heads, heads)
        copies = max(tp // key_heads, 1)
        if key_heads % tp and tp % key_heads:
            raise RuleBroken(
                f"layout.tp = {tp}, {self._path} has {key_heads} key-value heads: they are cut, or repeated, evenly",
                fix="use a tp that divides them, or that they divide",
            )
        for name, role in roles.items():
            if role == "column":
                self._column(name, self._head_parts(name, width, heads, key_heads, copies))
            elif role == "row":
                self._row(name)
        self._norms(width, width // heads, key_heads, copies)
        self._local_heads(heads, key_heads, copies)

    def _key_heads(self, size: int, heads: int) -> int:
        for name, module in self._products.items():
            if name in KEY_NAMES:
                return widths(module)[1] // size
            if self._fused.get(name) == "parts":
                return (widths(module)[1] // size - heads) // 2
        return heads

    def _head_parts(self, name: str, width: int, heads: int, key_heads: int, copies: int) -> tuple[Part, ...]:
        out = widths(self._products[name])[1]
        if self._fused.get(name) == "parts":
            if copies > 1:
                raise RuleBroken(
                    f"layout.tp = {self._tp}, {self._path}.{name} joins queries with {key_heads} key-value heads, which would "
                    "have to be repeated: repeated heads need a projection of their own",
                    fix="use a tp that divides the key-value heads",
                )
            one = width // heads * key_heads
            if out != width + 2 * one:
                raise self._unplaced({name: "column"})
            return (Part(width), Part(one), Part(one))
        if name in KEY_NAMES:
            return (Part(out, copies),)
        if out % heads:
            raise self._unplaced({name: "column"})
        return (Part(out),)

    def _norms(self, width: int, size: int, key_heads: int, copies: int) -> None:
        """Norms of queries and keys: over one head they stay whole, over all heads they are cut with them."""
        for name, module in self._root.named_modules():
            if not _is_norm(module) or not any(True for _ in module.parameters(recurse=False)):
                continue
            shape = tuple(next(module.parameters(recurse=False)).shape)
            wide = {(width,): Part(width), (key_heads * size,): Part(key_heads * size, copies)}.get(shape)
            if wide is None or shape == (size,) or "kv_a" in name or "q_a" in name:
                continue
            if "RMSNorm" not in type(module).__name__:
                raise RuleBroken(
                    f"layout.tp = {self._tp}: {self._path}.{name} ({type(module).__name__}) is a norm over all heads, and only "
                    "an RMS norm is made from what each rank holds",
                    fix="use layout.tp = 1",
                )
            self._region.wide_norms[f"{self._path}.{name}"] = wide.copies
            for param, _ in module.named_parameters(recurse=False):
                self._region.slicings[f"{self._path}.{name}.{param}"] = Slicing(0, (wide,))

    def _local_heads(self, heads: int, key_heads: int, copies: int) -> None:
        """What the module's own code may ask itself for."""
        mine, keys = heads // self._tp, key_heads * copies // self._tp
        told = {**dict.fromkeys(HEADS, mine), **dict.fromkeys(KEY_HEADS, keys), "num_key_value_groups": mine // keys}
        for name, value in told.items():
            if isinstance(getattr(self._root, name, None), int):
                self._region.settings.append((self._path, name, value))
        split = getattr(self._root, "split_size", None)
        if isinstance(split, int):
            self._region.settings.append((self._path, "split_size", split // self._tp))
        self._region.heads = told

    # MLP and experts.

    def _mlp(self, roles: dict[str, Role | None], holder: str) -> None:
        cut = {n: r for n, r in roles.items() if r != "whole"}
        rows = [n for n, r in cut.items() if r == "row"]
        if not cut:
            return
        if len(rows) != 1:
            raise self._unplaced(roles)
        width = widths(self._products[rows[0]])[0]
        for name in cut:
            out = widths(self._products[name])[1]
            if name in rows:
                self._row(name)
            elif out in (width, 2 * width):
                self._even(name, width)
                self._column(name, (Part(width),) * (out // width), at_border=not holder)
            else:
                raise self._unplaced(roles)

    def _even(self, name: str, width: int) -> None:
        if width % self._tp:
            raise RuleBroken(
                f"layout.tp = {self._tp}, {self._path}.{name} is {width} wide: tensor parallelism cuts widths evenly",
                fix="use a tp that divides it",
            )

    def _experts(self) -> None:
        """Stacked experts: gate and up [experts, 2 x width, hidden], down [experts, hidden, width]."""
        for name, module in self._root.named_modules():
            shapes = _stacked(module)
            if not shapes:
                continue
            path = f"{self._path}.{name}" if name else self._path
            up, down = shapes.get("gate_up_proj"), shapes.get("down_proj")
            own = {n for n, _ in module.named_parameters(recurse=False)}
            if not up or not down or own != {"gate_up_proj", "down_proj"} or up[1] != 2 * down[2] or up[2] != self._hidden:
                seen = ", ".join(f"{n} {list(p.shape)}" for n, p in module.named_parameters(recurse=False))
                raise BadInput(
                    f"layout.tp = {self._tp}: {path} ({type(module).__name__}) holds weights of three dims that are no experts "
                    f"in a known form (saw {seen})",
                    fix="use layout.tp = 1",
                )
            width = down[2]
            self._even(f"{name}.down_proj" if name else "down_proj", width)
            self._grouped(path, width)
            self._region.slicings[f"{path}.gate_up_proj"] = Slicing(1, (Part(width), Part(width)))
            self._region.slicings[f"{path}.down_proj"] = Slicing(2, (Part(width),))
            if isinstance(getattr(module, "intermediate_dim", None), int):
                self._region.settings.append((path, "intermediate_dim", width // self._tp))

    def _grouped(self, path: str, width: int) -> None:
        """Torch's grouped product reads rows that begin at multiples of 16 bytes."""
        row = width // self._tp * self._item_bytes
        if row % 16 and width * self._item_bytes % 16 == 0:
            raise RuleBroken(
                f"layout.tp = {self._tp}, {path} would have {width // self._tp} columns of {self._item_bytes} bytes a rank: "
                "grouped products take rows of a multiple of 16 bytes",
                fix="use a smaller tp",
            )

    # What all share.

    def _column(self, name: str, parts: tuple[Part, ...], *, at_border: bool = True) -> None:
        module, path = self._products[name], f"{self._path}.{name}"
        self._region.slicings[f"{path}.weight"] = Slicing(1 if is_transposed(module) else 0, parts)
        if module.bias is not None:
            self._region.slicings[f"{path}.bias"] = Slicing(0, parts)
        reads = at_border and "." not in name and widths(module)[0] == self._hidden and not name.endswith("_b_proj")
        (self._region.columns if reads else self._region.inner).append(path)

    def _row(self, name: str) -> None:
        module, path = self._products[name], f"{self._path}.{name}"
        self._region.slicings[f"{path}.weight"] = Slicing(0 if is_transposed(module) else 1, (Part(widths(module)[0]),))
        self._region.rows.append(path)

    def _rest(self, roles: dict[str, Role | None]) -> None:
        """Weights that stay whole: their gradients are terms, but for the biases of rows."""
        biases = {f"{path}.bias" for path in self._region.rows}
        for name, module in self._root.named_modules():
            path = f"{self._path}.{name}" if name else self._path
            for param, _ in module.named_parameters(recurse=False):
                full = f"{path}.{param}"
                if full in self._region.slicings or full in biases:
                    continue
                routes = "rout" in type(module).__name__.lower() or name.rpartition(".")[2] in ("gate", "router")
                if not (_is_norm(module) or routes or roles.get(name) == "whole"):
                    raise BadInput(
                        f"layout.tp = {self._tp}: what {full} in {type(module).__name__} is for is not known",
                        fix="use layout.tp = 1",
                    )
                self._region.terms.append(full)

    def _unplaced(self, roles: Mapping[str, Role | None]) -> BadInput:
        seen = ", ".join(f"{n} {widths(self._products[n])} {role or 'unknown'}" for n, role in roles.items())
        return BadInput(
            f"layout.tp = {self._tp}: the products of {self._path} do not fit together (looked at {seen}, inputs and outputs)",
            fix="name each in layout.parts as column, row or whole, or use layout.tp = 1",
        )
