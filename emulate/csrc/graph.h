// Graphs: what a stream recorded, in the order of the recording, on as many branches as streams took part.
#ifndef LAGOM_EMULATED_GPU_GRAPH_H
#define LAGOM_EMULATED_GPU_GRAPH_H
#include "stream.h"

#define GRAPH_NO_NODE UINT32_MAX

typedef struct CUgraphNode_st {
  operation operation;
  uint32_t branch, index;
  uint32_t after;  // OPERATION_WAIT_OP: the node that it waits for
} graph_node;

struct CUgraph_st {
  graph_node **nodes;
  uint32_t num_nodes, cap_nodes, num_branches, id;
  uint32_t *last_of_branch;  // newest node, GRAPH_NO_NODE while empty
  uint32_t *devices;         // of each branch
  CUstream origin;
  bool is_invalid;
  struct graph_user_object *objects;
};

struct CUuserObject_st {
  CUhostFn destroy;
  void *argument;
  unsigned references;
};

typedef struct graph_user_object {
  CUuserObject object;
  unsigned references;
  struct graph_user_object *next;
} graph_user_object;

// Called by stream.c under its lock.
CUresult graph_append(CUgraph graph, uint32_t branch, const operation *op, uint32_t after, uint32_t *index);
uint32_t graph_add_branch(CUgraph graph, uint32_t device);

CUgraph graph_create(void);
void graph_destroy(CUgraph graph);
CUresult graph_begin_capture(CUstream handle, int mode);
CUresult graph_end_capture(CUstream handle, CUgraph *out);
CUresult graph_instantiate(CUgraphExec *out, CUgraph graph);
void graph_exec_destroy(CUgraphExec exec);
CUresult graph_launch(CUgraphExec exec, CUstream handle);
#endif
