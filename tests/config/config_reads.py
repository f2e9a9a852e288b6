"""Which fields of the configuration's dataclasses the code reads, found by a small type inference over its syntax trees.

An expression has the names of the classes it may be an instance of: parameters and fields by their annotations, other names by
what is assigned to them, attributes by the class that has them. What cannot be inferred reads nothing.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

Types = frozenset[str]
NONE: Types = frozenset()
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Program:
    """attributes: class -> attribute -> its types; returns: function -> types of its result; bases: class -> its base classes."""

    attributes: dict[str, dict[str, Types]] = field(default_factory=dict)
    returns: dict[str, Types] = field(default_factory=dict)
    bases: dict[str, list[str]] = field(default_factory=dict)
    reads: set[tuple[str, str]] = field(default_factory=set)

    def attribute(self, types: Types, name: str) -> Types:
        found: Types = NONE
        for cls in types:
            for owner in self._with_bases(cls):
                if name in self.attributes.get(owner, {}):
                    found |= self.attributes[owner][name]
                    self.reads.add((owner, name))
                    break
        return found

    def _with_bases(self, cls: str) -> Iterator[str]:
        yield cls
        for base in self.bases.get(cls, []):
            yield from self._with_bases(base)


def fields_read(sources: Iterable[str]) -> set[tuple[str, str]]:
    """(class, attribute) of every attribute of the sources' classes that some expression reads."""
    trees = [ast.parse(source) for source in sources]
    program = Program()
    for tree in trees:
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            bases = [base.id for base in cls.bases if isinstance(base, ast.Name) and base.id != cls.name]
            program.bases.setdefault(cls.name, []).extend(bases)  # classes of two modules may share a name
            program.attributes.setdefault(cls.name, {})
    for tree in trees:
        _declare(program, tree)
    known = -1
    while known < len(
        program.reads
    ):  # attributes assigned in one class may be read in another: repeat until nothing is new
        known = len(program.reads)
        for tree in trees:
            _Reader(program, {}, None).visit(tree)
    return program.reads


def _declare(program: Program, tree: ast.Module) -> None:
    """The annotations of fields, properties and functions."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            program.returns[node.name] = program.returns.get(node.name, NONE) | _annotated(program, node.returns)
        if isinstance(node, ast.ClassDef):
            own = program.attributes[node.name]
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    own[part.target.id] = _annotated(program, part.annotation)
                if isinstance(part, Function) and any(ast.unparse(d) == "property" for d in part.decorator_list):
                    own[part.name] = _annotated(program, part.returns)


def _annotated(program: Program, annotation: ast.expr | None) -> Types:
    """Every known class that an annotation mentions, `list[X]` included."""
    if annotation is None:
        return NONE
    return frozenset(set(re.findall(r"\w+", ast.unparse(annotation))) & program.attributes.keys())


class _Reader(ast.NodeVisitor):
    """Visits one scope; names: its variables' types, those of the enclosing scopes included; cls: the class around it."""

    def __init__(self, program: Program, names: Mapping[str, Types], cls: str | None) -> None:
        self.program, self.names, self.cls = program, dict(names), cls

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        inner = _Reader(self.program, self.names, node.name)
        for part in node.body:
            inner.visit(part)

    def visit_FunctionDef(self, node: Function) -> None:
        inner = _Reader(self.program, self.names, self.cls)
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            inner.names[argument.arg] = _annotated(self.program, argument.annotation)
        if self.cls is not None and arguments.args and arguments.args[0].arg == "self":
            inner.names["self"] = frozenset({self.cls})
        for part in (*arguments.defaults, *node.body):
            inner.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self.names[node.target.id] = _annotated(self.program, node.annotation)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._assign(node.target, node.value)

    def visit_For(self, node: ast.For) -> None:
        self._bind_loop(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind_loop(node.target, node.iter)
        self.generic_visit(node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        for part in node.generators:
            self.visit(part)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.types(node)
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        self.visit(inner)

    def visit_Call(self, node: ast.Call) -> None:
        self.types(node)
        self.generic_visit(node)

    def _bind_loop(self, target: ast.expr, values: ast.expr) -> None:
        items = values.elts if isinstance(values, ast.Tuple | ast.List) else [values]
        if isinstance(target, ast.Name):
            self.names[target.id] = frozenset().union(*map(self.types, items))
        elif isinstance(target, ast.Tuple):
            for position, name in enumerate(target.elts):
                parts = [item.elts[position] for item in items if isinstance(item, ast.Tuple)]
                if isinstance(name, ast.Name):
                    self.names[name.id] = frozenset().union(*map(self.types, parts))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its_value in zip(target.elts, value.elts):
                self._assign(one, its_value)
        elif isinstance(target, ast.Name):
            self.names[target.id] = self.names.get(target.id, NONE) | self.types(value)
        elif isinstance(target, ast.Attribute) and self.cls is not None and ast.unparse(target.value) == "self":
            own = self.program.attributes[self.cls]
            own[target.attr] = own.get(target.attr, NONE) | self.types(value)

    def types(self, node: ast.expr) -> Types:
        """The classes whose instance `node` may be."""
        match node:
            case ast.Name():
                return self.names.get(node.id, NONE)
            case ast.Attribute():
                return self.program.attribute(self.types(node.value), node.attr)
            case ast.IfExp():
                return self.types(node.body) | self.types(node.orelse)
            case ast.BoolOp():
                return frozenset().union(*map(self.types, node.values))
            case ast.NamedExpr() | ast.Await() | ast.Subscript():
                return self.types(node.value)
            case ast.Call(func=ast.Name("getattr"), args=[of, ast.Constant(value=str(name)), *_]):
                return self.program.attribute(self.types(of), name)
            case ast.Call(func=ast.Name("replace") | ast.Attribute(attr="replace"), args=[of, *_]):
                return self.types(of)
            case ast.Call(func=ast.Name(name)) if name in self.program.attributes:
                return frozenset({name})
            case ast.Call(func=ast.Name(name)) | ast.Call(func=ast.Attribute(attr=name)):
                return self.program.returns.get(name, NONE)
        return NONE
