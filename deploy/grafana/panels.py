"""Panels as data, and their conversion to Grafana JSON.

Owns the common parts of all dashboards: the variables `datasource`, `namespace`, `instance` and
`model`, the grid, the style. Knows no metric, but for those that list the variables' values.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, heatmap, prometheus, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_ROW_WIDTH = 24
_PANEL_HEIGHT = 8

#: The selector of every query; `All` includes series without a namespace.
NAMESPACE = 'namespace=~"$namespace"'

#: The selector of metrics; recorded series are of all instances.
INSTANCE = 'instance=~"$instance"'

#: The selector of metrics by model.
MODEL = 'model=~"$model"'

_RED, _GREEN = "red", "green"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """PromQL, and the name of its series in the legend."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One graph.

    Attributes:
        description: what it shows, and how to read it.
        unit: Grafana's unit id.
        queries: at least one; a heatmap has exactly one, by `le`.
        stacked: whether the series are parts of a whole.
        max_value: the fixed end of the axis, if any.
        alarming_over: values over this are bad; a line shows it.
        alarming_under: values under this are; at most one of the two is given.
    """

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    stacked: bool = False
    heatmap: bool = False
    max_value: float | None = None
    alarming_over: float | None = None
    alarming_under: float | None = None
    width: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under a heading, side by side."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A page of rows; `uid` is its name in URLs and files."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]

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
    for row in dashboard.rows:
        page.with_row(builders.Row(row.title).grid_pos(_place(0, top, _ROW_WIDTH, 1)))
        top += 1
        left = 0
        for panel in row.panels:
            if left + panel.width > _ROW_WIDTH:
                left = 0
                top += _PANEL_HEIGHT
            place = _place(left, top, panel.width, _PANEL_HEIGHT)
            page.with_panel(_heatmap(panel, place) if panel.heatmap else _graph(panel, place))
            left += panel.width
        top += _PANEL_HEIGHT
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
    graph = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .grid_pos(place)
        .unit(panel.unit)
        .min(0)
        .line_width(1)
        .fill_opacity(40 if panel.stacked else 8)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    if panel.max_value is not None:
        graph.max(panel.max_value)
    if (limit := panel.alarming_over) is not None:
        _draw_threshold(graph, _GREEN, limit, _RED)
    elif (limit := panel.alarming_under) is not None:
        _draw_threshold(graph, _RED, limit, _GREEN)
    if panel.stacked:
        graph.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    for query in _targets(panel.queries):
        graph.with_target(query)
    return graph


def _draw_threshold(graph: timeseries.Panel, under: str, limit: float, over: str) -> None:
    """Draws a line at the limit, and gives values their colours."""
    graph.thresholds(
        builders.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps(
            [
                models.Threshold(value=None, color=under),
                models.Threshold(value=limit, color=over),
            ]
        )
    ).thresholds_style(
        common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED)
    )


def _heatmap(panel: Panel, place: models.GridPos) -> heatmap.Panel:
    graph = (
        heatmap.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .grid_pos(place)
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Blues")
            .steps(32)
        )
    )
    for query in _targets(panel.queries):
        graph.with_target(query.format(PromQueryFormat.HEATMAP))
    return graph


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
