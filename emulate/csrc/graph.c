#include "graph.h"

#include <stdlib.h>
#include <string.h>

#include "context.h"

struct CUgraphExec_st {
  CUgraph graph;  // a copy: the graph it came from may be destroyed or change
  uint64_t *ends;  // of the nodes in the newest launch
  CUstream *branches;  // the first is the stream of the launch
};

static _Atomic uint32_t last_graph_id;

CUgraph graph_create(void) {
  CUgraph graph = calloc(1, sizeof *graph);
  if (graph) graph->id = ++last_graph_id;
  return graph;
}

static void release_objects(CUgraph graph) {
  for (graph_user_object *at = graph->objects, *next; at; at = next) {
    next = at->next;
    if ((at->object->references -= at->references) == 0) {
      at->object->destroy(at->object->argument);
      free(at->object);
    }
    free(at);
  }
}

void graph_destroy(CUgraph graph) {
  release_objects(graph);
  for (uint32_t i = 0; i < graph->num_nodes; i++) free(graph->nodes[i]);
  free(graph->nodes);
  free(graph->last_of_branch);
  free(graph->devices);
  free(graph);
}

CUresult graph_append(CUgraph graph, uint32_t branch, const operation *op, uint32_t after, uint32_t *index) {
  if (graph->num_nodes == graph->cap_nodes) {
    uint32_t wider = graph->cap_nodes ? 2 * graph->cap_nodes : 64;
    graph_node **more = realloc(graph->nodes, wider * sizeof *more);
    if (!more) return CUDA_ERROR_OUT_OF_MEMORY;
    graph->nodes = more, graph->cap_nodes = wider;
  }
  graph_node *node = malloc(sizeof *node);
  if (!node) return CUDA_ERROR_OUT_OF_MEMORY;
  *node = (graph_node){*op, branch, graph->num_nodes, after};
  graph->nodes[graph->num_nodes] = node;
  graph->last_of_branch[branch] = *index = graph->num_nodes++;
  return CUDA_SUCCESS;
}

uint32_t graph_add_branch(CUgraph graph, uint32_t device) {
  uint32_t branch = graph->num_branches++;
  uint32_t *last = realloc(graph->last_of_branch, graph->num_branches * sizeof *last);
  if (last) graph->last_of_branch = last;
  uint32_t *devices = realloc(graph->devices, graph->num_branches * sizeof *devices);
  if (devices) graph->devices = devices;
  if (!last || !devices) abort();
  graph->last_of_branch[branch] = GRAPH_NO_NODE;
  graph->devices[branch] = device;
  return branch;
}

CUresult graph_begin_capture(CUstream handle, int mode) {
  CUstream stream = stream_of(handle);
  // As CUDA has it: the legacy default stream cannot be captured.
  if (stream->capture || !stream->number) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  CUgraph graph = graph_create();
  if (!graph) return CUDA_ERROR_OUT_OF_MEMORY;
  graph->origin = stream;
  stream->branch = graph_add_branch(graph, stream->device);
  stream->capture_mode = mode;
  stream->capture = graph;
  return CUDA_SUCCESS;
}

// All work must have been joined: it is waited for, directly or not, by the first branch. A stream that has only waited since
// it was joined holds no work; FSDP2's streams end a captured step so.
static bool is_joined(const struct CUgraph_st *graph) {
  bool *joined = calloc(graph->num_nodes + 1, sizeof *joined);
  if (!joined) return false;
  uint32_t *newest = malloc(graph->num_branches * sizeof *newest);
  if (!newest) abort();
  for (uint32_t i = 0; i < graph->num_branches; i++) newest[i] = GRAPH_NO_NODE;
  for (uint32_t i = graph->num_nodes; i-- > 0;) {  // backwards: a node is joined if a later joined node follows it
    const graph_node *node = graph->nodes[i];
    bool is_followed = node->branch == 0 || joined[i] || (newest[node->branch] != GRAPH_NO_NODE && joined[newest[node->branch]]);
    joined[i] = is_followed;
    if (newest[node->branch] == GRAPH_NO_NODE || joined[i]) newest[node->branch] = i;
    if (is_followed && node->after != GRAPH_NO_NODE) joined[node->after] = true;
  }
  bool all = true;
  for (uint32_t i = 0; i < graph->num_nodes; i++) all &= joined[i] || graph->nodes[i]->operation.kind == OPERATION_WAIT_OP;
  free(newest);
  free(joined);
  return all;
}

CUresult graph_end_capture(CUstream handle, CUgraph *out) {
  CUstream stream = stream_of(handle);
  CUgraph graph = stream->capture;
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  if (graph->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  stream_leave_capture(graph);
  CUresult result = graph->is_invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                    : is_joined(graph) ? CUDA_SUCCESS
                                       : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  if (result) graph_destroy(graph), graph = NULL;
  *out = graph;
  return result;
}

static CUgraph copy_of(const struct CUgraph_st *graph) {
  CUgraph copy = graph_create();
  if (!copy) return NULL;
  copy->id = graph->id;
  for (uint32_t i = 0; i < graph->num_branches; i++) graph_add_branch(copy, graph->devices[i]);
  for (uint32_t i = 0; i < graph->num_nodes; i++) {
    uint32_t index;
    const graph_node *node = graph->nodes[i];
    if (graph_append(copy, node->branch, &node->operation, node->after, &index)) abort();
  }
  for (const graph_user_object *at = graph->objects; at; at = at->next) {
    graph_user_object *held = malloc(sizeof *held);
    if (!held) abort();
    *held = (graph_user_object){at->object, at->references, copy->objects};
    at->object->references += at->references;
    copy->objects = held;
  }
  return copy;
}

CUresult graph_instantiate(CUgraphExec *out, CUgraph graph) {
  CUgraphExec exec = calloc(1, sizeof *exec);
  if (!exec) return CUDA_ERROR_OUT_OF_MEMORY;
  exec->graph = copy_of(graph);
  exec->ends = calloc(graph->num_nodes + 1, sizeof *exec->ends);
  exec->branches = calloc(graph->num_branches + 1, sizeof *exec->branches);
  if (!exec->graph || !exec->ends || !exec->branches) return CUDA_ERROR_OUT_OF_MEMORY;
  CUcontext before = context_current();
  for (uint32_t i = 1; i < graph->num_branches; i++) {
    context_set(context_primary(graph->devices[i]));
    exec->branches[i] = stream_create(CU_STREAM_NON_BLOCKING, 0);
  }
  context_set(before);
  *out = exec;
  return CUDA_SUCCESS;
}

void graph_exec_destroy(CUgraphExec exec) {
  for (uint32_t i = 1; i < exec->graph->num_branches; i++) stream_destroy(exec->branches[i]);
  graph_destroy(exec->graph);
  free(exec->ends);
  free(exec->branches);
  free(exec);
}

static CUresult launch_nodes(CUgraphExec exec, uint32_t correlation) {
  CUgraph graph = exec->graph;
  CUresult result = CUDA_SUCCESS;
  for (uint32_t i = 0; i < graph->num_nodes && !result; i++) {
    const graph_node *node = graph->nodes[i];
    operation op = node->operation;
    if (op.kind == OPERATION_WAIT_OP) op.after_op = exec->ends[node->after];
    result = stream_submit_node(exec->branches[node->branch], &op, 0, correlation, graph->id, i + 1, &exec->ends[i]);
  }
  return result;
}

CUresult graph_launch(CUgraphExec exec, CUstream handle) {
  CUgraph graph = exec->graph;
  CUstream stream = stream_of(handle);
  activity told = {.api = "cudaGraphLaunch", .wall_start_ns = stream_wall_ns(), .correlation = stream_next_correlation()};
  static const operation launch = {.kind = OPERATION_WAIT_OP};  // a call that did not wait
  told.operation = &launch, told.device = stream->device, told.stream = stream->number;
  if (stream->capture) return CUDA_ERROR_NOT_SUPPORTED;  // a graph within a graph
  client_advance(client_launch_ns());
  exec->branches[0] = stream;
  // The other branches start when the launching stream comes to the graph.
  operation start = {.kind = OPERATION_WAIT_OP, .after_op = stream->last_op};
  CUresult result = CUDA_SUCCESS;
  for (uint32_t i = 1; i < graph->num_branches && !result && stream->last_op; i++)
    result = stream_submit_node(exec->branches[i], &start, 0, told.correlation, graph->id, 0, NULL);
  if (!result) result = launch_nodes(exec, told.correlation);
  if (!result) stream_tell(&told);
  return result;
}
