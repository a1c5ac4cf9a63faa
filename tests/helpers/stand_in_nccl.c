/* A stand-in for NCCL between processes of one machine: what a trainer and its receivers call, over sockets between rank 0
 * and each other rank, on memory of the host. Each message says how many bytes it has and of which dtype, so that a receiver that expects anything else is
 * told; NCCL itself would hang. The functions that vLLM wants to find and does not call here return an error. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

typedef struct { char internal[128]; } ncclUniqueId;
enum { MOST_RANKS = 16 };
typedef struct { int fds[MOST_RANKS], num, rank; } Comm; /* rank 0: a socket for each other rank; others: one to rank 0 */
typedef struct { uint64_t bytes; int32_t dtype; int32_t kind; } Header;
enum { SUCCESS = 0, SYSTEM = 2, USAGE = 5, REMOTE = 6 };
static const struct timeval MOST = {.tv_sec = 60};
static int listening = -1;

static int dtype_bytes(int dtype) {
    switch (dtype) {
        case 0: case 1: case 10: case 11: return 1;
        case 6: case 9: return 2;
        case 2: case 3: case 7: return 4;
        default: return 8;
    }
}

static int send_all(int fd, const void *data, size_t size) {
    for (const char *at = data; size;) {
        ssize_t sent = send(fd, at, size, MSG_NOSIGNAL);
        if (sent <= 0) return REMOTE;
        at += sent, size -= sent;
    }
    return SUCCESS;
}

static int receive_all(int fd, void *data, size_t size) {
    for (char *at = data; size;) {
        ssize_t got = recv(fd, at, size, 0);
        if (got <= 0) return REMOTE;
        at += got, size -= got;
    }
    return SUCCESS;
}

const char *ncclGetErrorString(int code) {
    return code == REMOTE ? "remote process exited" : code == USAGE ? "invalid usage" : "system error";
}

int ncclGetVersion(int *version) { return *version = 22907, SUCCESS; }

int ncclGetUniqueId(ncclUniqueId *id) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    listening = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listening, (void *)&address, size) || listen(listening, MOST_RANKS)) return SYSTEM;
    if (getsockname(listening, (void *)&address, &size)) return SYSTEM;
    memset(id, 0x5a, sizeof *id);
    memcpy(id, &address.sin_port, 2);
    return SUCCESS;
}

int ncclCommInitRank(Comm **made, int size, ncclUniqueId id, int rank) {
    if (size < 2 || size > MOST_RANKS) return USAGE;
    Comm *comm = calloc(1, sizeof *comm);
    comm->rank = rank;
    if (rank == 0) {
        setsockopt(listening, SOL_SOCKET, SO_RCVTIMEO, &MOST, sizeof MOST);
        while (comm->num < size - 1) {
            int fd = accept(listening, NULL, NULL);
            if (fd < 0) return SYSTEM;
            comm->fds[comm->num++] = fd;
        }
        close(listening);
    } else {
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        memcpy(&address.sin_port, &id, 2);
        comm->fds[comm->num++] = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(comm->fds[0], (void *)&address, sizeof address)) return SYSTEM;
    }
    for (int i = 0; i < comm->num; i++) setsockopt(comm->fds[i], SOL_SOCKET, SO_SNDTIMEO, &MOST, sizeof MOST);
    *made = comm;
    return SUCCESS;
}

static int give(int fd, const void *data, size_t count, int dtype, int kind) {
    Header header = {count * dtype_bytes(dtype), dtype, kind};
    int failed = send_all(fd, &header, sizeof header);
    return failed ? failed : send_all(fd, data, header.bytes);
}

static int take(int fd, void *data, size_t count, int dtype, int kind) {
    Header header;
    int failed = receive_all(fd, &header, sizeof header);
    if (failed) return failed;
    if (header.bytes != count * dtype_bytes(dtype) || header.dtype != dtype || header.kind != kind) return USAGE;
    return receive_all(fd, data, header.bytes);
}

int ncclAllReduce(const void *from, void *to, size_t count, int dtype, int operation, Comm *comm, void *stream) {
    float sum, theirs;
    int failed = 0;
    if (count != 1 || dtype != 7 || operation != 0) return USAGE;
    memcpy(&sum, from, 4);
    if (comm->rank) { /* rank 0 adds up, and returns the sum */
        failed = give(comm->fds[0], &sum, 1, dtype, 1);
        if (!failed) failed = take(comm->fds[0], &sum, 1, dtype, 1);
    } else {
        for (int i = 0; i < comm->num && !failed; i++, sum += theirs) failed = take(comm->fds[i], &theirs, 1, dtype, 1);
        for (int i = 0; i < comm->num && !failed; i++) failed = give(comm->fds[i], &sum, 1, dtype, 1);
    }
    memcpy(to, &sum, 4);
    return failed;
}

int ncclBroadcast(const void *from, void *to, size_t count, int dtype, int root, Comm *comm, void *stream) {
    if (root != 0) return USAGE;
    if (comm->rank) return take(comm->fds[0], to, count, dtype, 2);
    int failed = 0;
    for (int i = 0; i < comm->num && !failed; i++) failed = give(comm->fds[i], from, count, dtype, 2);
    return failed;
}

int ncclCommGetAsyncError(Comm *comm, int *found) { return *found = SUCCESS, SUCCESS; }

int ncclCommAbort(Comm *comm) {
    for (int i = 0; i < comm->num; i++) {
        shutdown(comm->fds[i], SHUT_RDWR);  // which ends what another thread waits for
        close(comm->fds[i]);                // which tells the other side
    }
    comm->num = 0;
    return SUCCESS;
}

int ncclCommDestroy(Comm *comm) { return ncclCommAbort(comm); }

#define NOT_HERE(name) int name(void) { return USAGE; }
NOT_HERE(ncclReduce) NOT_HERE(ncclAllGather) NOT_HERE(ncclReduceScatter) NOT_HERE(ncclSend) NOT_HERE(ncclRecv)
NOT_HERE(ncclGroupStart) NOT_HERE(ncclGroupEnd) NOT_HERE(ncclCommSuspend) NOT_HERE(ncclCommResume)
NOT_HERE(ncclCommWindowRegister) NOT_HERE(ncclCommWindowDeregister) NOT_HERE(ncclCommQueryProperties)
