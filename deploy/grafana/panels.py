"""Panels as data, and their conversion to Grafana JSON.

Owns the common parts of all dashboards: the variables `datasource`, `namespace`, `instance` and
`model`, the grid, the style. Knows no metric, but for those that list the variables' values.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import (
    common,
    prometheus,
    stat,
    statetimeline,
    text,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import text as text_models

_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
#: Of a page, in Grafana's columns.
ROW_WIDTH = 24
_TEXT_HEIGHT = 4
_Builder = TypeVar("_Builder")

#: The selector of every query; `All` includes series without a namespace.
NAMESPACE = 'namespace=~"$namespace"'

#: The selector of metrics; recorded series are of all instances.
INSTANCE = 'instance=~"$instance"'

#: The selector of metrics by model.
MODEL = 'model=~"$model"'

RED, YELLOW, GREEN = "red", "orange", "green"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """PromQL, and the name of its series in the legend."""

    expression: str
    legend: str


class Kind(Enum):
    """How a panel shows its series."""

    GRAPH = "lines"
    PARTS = "parts of a whole, stacked"
    TILE = "the present value"
    STATES = "bars in time, one per series, in the colour of its value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A part of a page.

    Attributes:
        description: what it shows, and how to read it.
        unit: Grafana's unit id.
        queries: at least one.
        max_value: the fixed end of the axis, if any.
        colours: of values, each from a bound on, ascending; below the first bound it is the first
            colour, too. A graph has lines at the bounds.
    """

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: Kind = Kind.GRAPH
    max_value: float | None = None
    colours: Sequence[tuple[float, str]] = ()
    width: int = 8

    @property
    def height(self) -> int:
        """In Grafana's rows."""
        return 4 if self.kind is Kind.TILE else 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels of equal height under a heading, side by side."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A page of rows; `uid` is its name in URLs and files, `introduction` Markdown at its top."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    introduction: str = ""

    def panels(self) -> list[Panel]:
        """All panels, in order."""
        return [panel for row in self.rows for panel in row.panels]


def rate(metric: str, matchers: str = "") -> str:
    """A counter's rate over Grafana's rate interval."""
    return f"rate({gauge(metric, matchers)}[$__rate_interval])"


def gauge(metric: str, matchers: str = "") -> str:
    """A gauge."""
    selectors = (NAMESPACE, INSTANCE, matchers) if matchers else (NAMESPACE, INSTANCE)
    return f"{metric}{{{','.join(selectors)}}}"


def recorded(series: str) -> str:
    """A recorded series."""
    return f"{series}{{{NAMESPACE}}}"


def without_variables(expression: str, rate_interval: str) -> str:
    """The query of a dashboard that shows all, for Prometheus itself."""
    for variable in ("namespace", "instance", "model"):
        expression = expression.replace(f"${variable}", ".*")
    return expression.replace("$__rate_interval", rate_interval)


def total(expression: str, *by: str) -> str:
    """The sum over all series, or by labels."""
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def quantiles(
    histogram: str, *levels: float, by: Sequence[str] = (), matchers: str = ""
) -> list[Query]:
    """A histogram's quantiles over all instances."""
    kept = total(rate(f"{histogram}_bucket", matchers), "le", *by)
    names = "".join(f"{{{{{label}}}}} " for label in by)
    return [
        Query(
            expression=f"histogram_quantile({level:g}, {kept})", legend=f"{names}p{100 * level:g}"
        )
        for level in levels
    ]


def to_json(dashboard: Dashboard) -> str:
    """The file that Grafana imports."""
    page = (
        builders.Dashboard(dashboard.title)
        .uid(dashboard.uid)
        .description(dashboard.description)
        .tags(["tandem"])
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
        .with_variable(_variable("namespace", "tandem_requests_received_total"))
        .with_variable(_variable("instance", f"tandem_serving{{{NAMESPACE}}}"))
        .with_variable(_variable("model", f"tandem_generation_tokens_total{{{NAMESPACE}}}"))
        .link(
            builders.DashboardLink("Tandem")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["tandem"])
            .keep_time(True)
            .include_vars(True)
        )
    )
    top = 0
    if dashboard.introduction:
        page.with_panel(
            text.Panel()
            .mode(text_models.TextMode.MARKDOWN)
            .content(dashboard.introduction)
            .grid_pos(_place(0, 0, ROW_WIDTH, _TEXT_HEIGHT))
        )
        top = _TEXT_HEIGHT
    for row in dashboard.rows:
        page.with_row(builders.Row(row.title).grid_pos(_place(0, top, ROW_WIDTH, 1)))
        top += 1
        left = 0
        for panel in row.panels:
            place = _place(left, top, panel.width, panel.height)
            page.with_panel(_BUILDERS[panel.kind](panel, place))
            left += panel.width
        top += row.panels[0].height
    return json.dumps(page.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _variable(label: str, series: str) -> builders.QueryVariable:
    """A label's values, several or all of which are chosen; they are those of some series."""
    return (
        builders.QueryVariable(label)
        .label(label.capitalize())
        .datasource(_SOURCE)
        .query(f"label_values({series}, {label})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all"))
    )


def _graph(panel: Panel, place: models.GridPos) -> timeseries.Panel:
    graph = _shown(timeseries.Panel(), panel, place).min(0).line_width(1)
    graph.fill_opacity(60 if panel.kind is Kind.PARTS else 0)
    graph.show_points(common_models.VisibilityMode.NEVER)
    graph.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    if panel.max_value is not None:
        graph.max(panel.max_value)
    if panel.colours:
        graph.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED)
        )
    if panel.kind is Kind.PARTS:
        graph.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    return graph


def _tile(panel: Panel, place: models.GridPos) -> stat.Panel:
    return (
        _shown(stat.Panel(), panel, place)
        .color_mode(common_models.BigValueColorMode.BACKGROUND)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _states(panel: Panel, place: models.GridPos) -> statetimeline.Panel:
    return (
        _shown(statetimeline.Panel(), panel, place)
        .color_scheme(builders.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .show_value(common_models.VisibilityMode.NEVER)
        .legend(common.VizLegendOptions().show_legend(False))
    )


_BUILDERS = {Kind.GRAPH: _graph, Kind.PARTS: _graph, Kind.TILE: _tile, Kind.STATES: _states}


def _shown(panel_builder: _Builder, panel: Panel, place: models.GridPos) -> _Builder:
    """Sets what all kinds have."""
    built: Any = panel_builder  # the kinds have no base class with these
    built.title(panel.title).description(panel.description).datasource(_SOURCE)
    built.grid_pos(place).unit(panel.unit)
    if panel.colours:
        bounds = [None, *(bound for bound, _ in panel.colours[1:])]
        steps = [
            models.Threshold(value=bound, color=colour)
            for bound, (_, colour) in zip(bounds, panel.colours, strict=True)
        ]
        built.thresholds(
            builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
        )
    for query in _targets(panel.queries):
        built.with_target(query)
    return panel_builder


def _targets(queries: Sequence[Query]) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery()
        .expr(query.expression)
        .legend_format(query.legend)
        .ref_id(chr(ord("A") + index))
        .datasource(_SOURCE)
        for index, query in enumerate(queries)
    ]


def _place(left: int, top: int, width: int, height: int) -> models.GridPos:
    return models.GridPos(x=left, y=top, w=width, h=height)
