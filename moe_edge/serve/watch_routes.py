"""The routes that tell how the engine does: `/metrics` and `/experts`."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moe_edge.serve.engine_thread import EngineThread
from moe_edge.serve.errors import ApiError
from moe_edge.serve.experts import ExpertWatch
from moe_edge.serve.metrics import CONTENT_TYPE, Metrics, take_figures


def watch_routes(
    thread: EngineThread, metrics: Metrics, experts: ExpertWatch
) -> list[Route]:
    """Both ask the engine's thread between two steps; observers of it come along."""

    async def tell_metrics(_: Request) -> Response:
        try:
            figures = await thread.ask(take_figures)
        except ApiError:  # loading or failed: what was counted is told all the same
            figures = None
        body = metrics.text(figures)
        return Response(body, headers={"Content-Type": CONTENT_TYPE})

    async def tell_experts(_: Request) -> Response:
        return JSONResponse(await thread.ask(experts.report))

    return [Route("/metrics", tell_metrics), Route("/experts", tell_experts)]
