// Peer benchmarks in Go. See ../README.md.
package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"sort"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

const rounds = 6

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func arg(i, def int) int {
	if len(os.Args) <= i {
		return def
	}
	n, err := strconv.Atoi(os.Args[i])
	must(err)
	return n
}

// repeat returns the first (cold) measurement and the median of the others.
func repeat(f func() float64) (first, warm float64) {
	first = f()
	var t []float64
	for i := 1; i < rounds; i++ {
		t = append(t, f())
	}
	sort.Float64s(t)
	return first, t[len(t)/2]
}

func rss() int {
	b, err := os.ReadFile("/proc/self/statm")
	must(err)
	var size, res int
	fmt.Sscan(string(b), &size, &res)
	return res * os.Getpagesize()
}

func benchSwitch(n int) {
	both := func(f func(i int)) float64 {
		var wg sync.WaitGroup
		wg.Add(2)
		t0 := time.Now()
		for i := 0; i < 2; i++ {
			go func() { f(i); wg.Done() }()
		}
		wg.Wait()
		return float64(time.Since(t0).Nanoseconds()) / float64(2*n)
	}
	first, warm := repeat(func() float64 {
		return both(func(int) {
			for i := 0; i < n; i++ {
				runtime.Gosched()
			}
		})
	})
	_, handoff := repeat(func() float64 {
		c := [2]chan struct{}{make(chan struct{}), make(chan struct{})}
		return both(func(i int) {
			for j := 0; j < n; j++ {
				if i == 0 {
					c[0] <- struct{}{}
					<-c[1]
				} else {
					<-c[0]
					c[1] <- struct{}{}
				}
			}
		})
	})
	fmt.Printf("RESULT switch go n=%d first_ns=%.1f ns=%.1f channel_ns=%.1f\n", n, first, warm, handoff)
}

func benchCreate(n int) {
	first, warm := repeat(func() float64 {
		var wg sync.WaitGroup
		wg.Add(n)
		t0 := time.Now()
		for i := 0; i < n; i++ {
			go func() { runtime.Gosched(); wg.Done() }()
		}
		wg.Wait()
		return time.Since(t0).Seconds() * 1e3
	})
	fmt.Printf("RESULT create go n=%d first_ms=%.3f ms=%.3f us_per_fiber=%.4f\n", n, first, warm, warm*1e3/float64(n))
}

func benchIdle(n int) {
	var ready, done sync.WaitGroup
	ready.Add(n)
	done.Add(n)
	gate := make(chan struct{})
	r0, t0 := rss(), time.Now()
	for i := 0; i < n; i++ {
		go func() { ready.Done(); <-gate; done.Done() }()
	}
	ready.Wait()
	create := time.Since(t0)
	r1, t1 := rss(), time.Now()
	close(gate)
	done.Wait()
	fmt.Printf("RESULT idle go n=%d bytes_per_fiber=%d create_ms=%.1f wake_ms=%.1f\n",
		n, (r1-r0)/n, create.Seconds()*1e3, time.Since(t1).Seconds()*1e3)
}

func ask(r io.Reader, w io.Writer, b []byte) {
	_, err := w.Write(b)
	must(err)
	_, err = io.ReadFull(r, b)
	must(err)
}

func serve(r io.Reader, w io.Writer, size int) {
	b := make([]byte, size)
	for {
		if _, err := io.ReadFull(r, b); err != nil {
			return
		}
		if _, err := w.Write(b); err != nil {
			return
		}
	}
}

func benchPipe(workers, requests int) {
	var wg sync.WaitGroup
	wg.Add(2 * workers)
	var rs, ws []*os.File
	for i := 0; i < 2*workers; i++ {
		r, w, err := os.Pipe()
		must(err)
		rs, ws = append(rs, r), append(ws, w)
	}
	t0 := time.Now()
	for i := 0; i < workers; i++ {
		q, a := 2*i, 2*i+1
		go func() { serve(rs[q], ws[a], 8); wg.Done() }()
		go func() {
			b := make([]byte, 8)
			for j := 0; j < requests; j++ {
				ask(rs[a], ws[q], b)
			}
			ws[q].Close()
			wg.Done()
		}()
	}
	wg.Wait()
	t := time.Since(t0).Seconds()
	fmt.Printf("RESULT pipe go p=%d workers=%d requests=%d s=%.3f us_per_request=%.3f\n",
		runtime.GOMAXPROCS(0), workers, requests, t, t*1e6/float64(workers*requests))
}

func benchRPC(conns int, secs float64) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	go func() {
		for {
			c, err := l.Accept()
			must(err)
			go serve(c, c, 1)
		}
	}()
	type count struct {
		n atomic.Int64
		_ [56]byte
	}
	ops := make([]count, conns)
	for i := range ops {
		c, err := net.Dial("tcp", l.Addr().String())
		must(err)
		go func() {
			b := make([]byte, 1)
			for {
				ask(c, c, b)
				ops[i].n.Add(1)
			}
		}()
	}
	total := func() (t int64) {
		for i := range ops {
			t += ops[i].n.Load()
		}
		return
	}
	time.Sleep(700 * time.Millisecond)
	n0, t0 := total(), time.Now()
	time.Sleep(time.Duration(secs * float64(time.Second)))
	n1 := total()
	fmt.Printf("RESULT rpc go p=%d conns=%d ops_per_s=%.0f\n",
		runtime.GOMAXPROCS(0), conns, float64(n1-n0)/time.Since(t0).Seconds())
}

func httpStandard(addr string) {
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain")
		io.WriteString(w, "Hello, World!")
	})
	must(http.ListenAndServe(addr, nil))
}

var answer = []byte("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 13\r\n\r\nHello, World!")

func httpRaw(addr string) { // no HTTP library: read lines up to an empty one, answer
	l, err := net.Listen("tcp", addr)
	must(err)
	for {
		c, err := l.Accept()
		must(err)
		go func() {
			defer c.Close()
			r := bufio.NewReader(c)
			for {
				line, err := r.ReadSlice('\n')
				if err != nil {
					return
				}
				if len(line) <= 2 {
					if _, err := c.Write(answer); err != nil {
						return
					}
				}
			}
		}()
	}
}

func both(f, g func()) float64 {
	var wg sync.WaitGroup
	wg.Add(2)
	t0 := time.Now()
	go func() { f(); wg.Done() }()
	go func() { g(); wg.Done() }()
	wg.Wait()
	return float64(time.Since(t0).Nanoseconds())
}

func benchChannel(n, capacity int) {
	first, warm := repeat(func() float64 {
		c := make(chan int, capacity)
		return both(
			func() {
				for i := 0; i < n; i++ {
					c <- i
				}
			},
			func() {
				for i := 0; i < n; i++ {
					<-c
				}
			}) / float64(n)
	})
	fmt.Printf("RESULT channel go p=%d n=%d capacity=%d first_ns=%.1f ns=%.1f\n",
		runtime.GOMAXPROCS(0), n, capacity, first, warm)
}

func select2(c []chan int, n int) {
	for i := 0; i < n; i++ {
		select {
		case <-c[0]:
		case <-c[1]:
		}
	}
}

func select16(c []chan int, n int) {
	for i := 0; i < n; i++ {
		select {
		case <-c[0]:
		case <-c[1]:
		case <-c[2]:
		case <-c[3]:
		case <-c[4]:
		case <-c[5]:
		case <-c[6]:
		case <-c[7]:
		case <-c[8]:
		case <-c[9]:
		case <-c[10]:
		case <-c[11]:
		case <-c[12]:
		case <-c[13]:
		case <-c[14]:
		case <-c[15]:
		}
	}
}

func benchSelect(n, channels int) {
	receive := map[int]func([]chan int, int){2: select2, 16: select16}[channels]
	share := n / channels
	first, warm := repeat(func() float64 {
		c := make([]chan int, channels)
		for i := range c {
			c[i] = make(chan int)
		}
		t0 := time.Now()
		for _, ch := range c {
			go func() {
				for i := 0; i < share; i++ {
					ch <- i
				}
			}()
		}
		receive(c, share*channels)
		return float64(time.Since(t0).Nanoseconds()) / float64(share*channels)
	})
	fmt.Printf("RESULT select go p=%d n=%d channels=%d first_ns=%.1f ns=%.1f\n",
		runtime.GOMAXPROCS(0), n, channels, first, warm)
}

func main() {
	if p, err := strconv.Atoi(os.Getenv("P")); err == nil {
		runtime.GOMAXPROCS(p)
	}
	switch os.Args[1] {
	case "switch":
		benchSwitch(arg(2, 1000000))
	case "create":
		benchCreate(arg(2, 10000))
	case "channel":
		benchChannel(arg(2, 300000), arg(3, 0))
	case "select":
		benchSelect(arg(2, 300000), arg(3, 2))
	case "idle":
		benchIdle(arg(2, 100000))
	case "pipe":
		benchPipe(arg(2, 5), arg(3, 20000))
	case "rpc":
		benchRPC(arg(2, 1), float64(arg(3, 3)))
	case "http":
		httpStandard("127.0.0.1:" + os.Args[2])
	case "http-raw":
		httpRaw("127.0.0.1:" + os.Args[2])
	default:
		panic("unknown benchmark " + os.Args[1])
	}
}
